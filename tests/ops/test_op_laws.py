"""The laws of the integer product and of the quantized linear (docs/numerics.md), on every
instruction set of this machine. Those of quantization: test_op_quantize.py."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import product

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import qfx._C as _C
from qfx.ops.code import Code
from qfx.ops.layout import Layout
from tests.conftest import THREADS, on_isa, on_threads, same_bits
from tests.lib.pairs import covering
from tests.lib.rows import ACTIVATIONS, THREADED, Row, reached, results
from tests.lib.strategies import (
    CODES,
    DTYPES,
    FAULTY,
    FINITE,
    ISAS,
    LAYOUTS,
    POSITIVE,
    SEEDS,
    SIZES,
    codes,
    matrices,
    step_error,
    strided,
)  # fmt: skip

ops = torch.ops.qfx
FLOAT32 = ("none", torch.float32)


def of_rows(codes: Tensor) -> Tensor:
    """A packed weight whose scales are 1."""
    return ops.pack_weight(codes, torch.ones(len(codes)))


# --- the integer product ---


@given(st.data(), SIZES, SIZES, SIZES, ISAS)
def test_integer_product_is_exact(data: st.DataObject, m: int, k: int, n: int, isa: str) -> None:
    """(G1), -128 on both sides included."""
    q, w = data.draw(codes(m, k)), data.draw(codes(n, k))
    zero_point = data.draw(codes(m, 1)).int()
    with on_isa(isa):
        acc = ops.int8_mm(q, zero_point, of_rows(w), n)
    assert torch.equal(acc.long(), (q.long() - zero_point) @ w.long().t())


@given(
    st.sampled_from([1, 2, 13]), ISAS, st.sampled_from([-128, 127]), st.sampled_from([-128, 127])
)
def test_longest_k_does_not_overflow(m: int, isa: str, code: int, zero: int) -> None:
    """(G1) at K = 65792 with all products of one sign."""
    k, n = 65792, 3
    q = torch.full((m, k), code, dtype=torch.int8)
    zero_point = torch.full((m, 1), -1 - zero, dtype=torch.int32)
    w = torch.full((n, k), -128, dtype=torch.int8)
    with on_isa(isa):
        acc = ops.int8_mm(q, zero_point, of_rows(w), n)
    assert (acc == k * (code + 1 + zero) * -128).all()


@given(st.data(), POSITIVE, POSITIVE, POSITIVE, SEEDS)
def test_permuting_k_changes_nothing(
    data: st.DataObject, m: int, k: int, n: int, seed: int
) -> None:
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(seed))
    w = data.draw(codes(n, k))
    order = torch.randperm(k, generator=torch.Generator().manual_seed(seed))

    def run(x: Tensor, w: Tensor) -> Tensor:
        weight = ops.pack_weight(w, torch.full((n,), 0.01))
        return ops.linear_dynamic(x, weight, Layout(n), None, Code(symmetric=0), *FLOAT32)

    assert torch.equal(run(x, w), run(x[:, order], w[:, order]))


@given(st.data(), POSITIVE, SIZES, SIZES, st.integers(1, 15), LAYOUTS, ISAS)
def test_packed_weights_may_lie_anywhere(
    data: st.DataObject, m: int, k: int, n: int, offset: int, layout: str, isa: str
) -> None:
    """At an unaligned address, or with gaps, as a slice of a file mapped into memory may."""
    q, packed = data.draw(codes(m, k)), of_rows(data.draw(codes(n, k)))
    zero_point = torch.zeros(1, dtype=torch.int32)
    unaligned = torch.cat([torch.zeros(offset, dtype=torch.int8), packed])[offset:]
    gaps = torch.stack([packed, packed], 1)[:, 0]
    with on_isa(isa):
        first = ops.int8_mm(strided(q, layout), zero_point, packed, n)
        for other in (unaligned, gaps):
            assert torch.equal(ops.int8_mm(strided(q, layout), zero_point, other, n), first)
    both = (ops.unpack_weight(each, Layout(n), k) for each in (unaligned, packed))
    assert all(map(torch.equal, *both))


# --- the quantized linear ---


@given(matrices(), POSITIVE, CODES, SEEDS)
def test_a_priori_bound(x: Tensor, n: int, code: Code, seed: int) -> None:
    """(B2), in float64 from the data; the last term is the rounding of (E1)."""
    assume(x.numel() == 0 or float(x.abs().amax()) < 1e30)
    k = x.shape[1]
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
    w_q, w_scale, _ = ops.quantize(w, Code())
    weight = ops.pack_weight(w_q, w_scale)
    y = ops.linear_dynamic(x, weight, Layout(n), None, code, *FLOAT32).double()
    e_x = step_error(ops.quantize(x, code)[1], *code[:2])
    e_x = e_x.expand(x.shape[0], 1)
    e_w = step_error(w_scale, 8, True).reshape(1, n)
    size_x, size_w = x.double().abs().sum(1, keepdim=True), w.double().abs().sum(1)
    bound = size_x * e_w + size_w * e_x + k * e_x * e_w
    exact = x.double() @ w.double().t()
    assert ((y - exact).abs() <= bound + 4 * 2.0**-24 * (exact.abs() + bound) + 1e-37).all()


@given(
    st.data(), matrices(fills=FINITE + FAULTY), SIZES, DTYPES, DTYPES, CODES, ISAS,
    st.sampled_from(tuple(ACTIVATIONS)), st.booleans(), st.sampled_from([1, 2]), LAYOUTS,
)  # fmt: skip
def test_fused_forms_give_the_same_bits(
    data: st.DataObject, x: Tensor, n: int, dtype: torch.dtype, out: torch.dtype, code: Code,
    isa: str, activation: str, with_bias: bool, threads: int, layout: str,
) -> None:  # fmt: skip
    """linear_dynamic == linear(quantize) == dequantize(int8_mm(quantize), weight_scale), on every
    instruction set and thread count, from any memory layout."""
    x, w = strided(x.to(dtype), layout), data.draw(codes(n, x.shape[1]))
    weight = ops.pack_weight(w, torch.linspace(0.001, 0.02, n))
    bias = torch.linspace(-2, 2, n) if with_bias else None
    epilogue = (bias, activation, out)

    def three_forms() -> list[Tensor]:
        q, scale, zero_point = ops.quantize(x, code)
        acc = ops.int8_mm(q, zero_point, weight, n)
        return [
            ops.linear_dynamic(x, weight, Layout(n), bias, code, activation, out),
            ops.linear(q, scale, zero_point, weight, Layout(n), *epilogue),
            ops.dequantize(acc, scale, None, ops.weight_scale(weight, n), *epilogue),
        ]

    with on_isa(isa), on_threads(threads):
        forms = three_forms()
    with on_isa("ref"):
        forms.append(three_forms()[0])
    assert all(same_bits(form, forms[0]) for form in forms[1:])


def _on(case: tuple[Row, str]) -> list[Hashable]:
    """A row, and its kind of codes on an instruction set."""
    row, isa = case
    return [row, (row.w_bits, row.shift, row.rotation, row.axes, isa)]


# Their products are PyTorch's, whose BLAS adds up in another order on other threads.
OF_FLOAT_PRODUCTS = ("lstm_float", "gru_float", "lstm_backward", "gru_backward")
CASES = covering(list(product(covering(THREADED, reached), _C.isas())), _on)


@pytest.mark.parametrize(("row", "isa"), CASES, ids=str, indirect=["isa"])
def test_threads_change_nothing(row: Row, isa: str) -> None:
    """Operands large enough for threads to share; compared with the reference in test_op_parts."""
    op, arguments = getattr(ops, row.op), row.arguments()
    with on_threads(1):
        alone = results(row.op, op, arguments)
    for threads in (THREADS, 3):
        with on_threads(threads):
            shared = results(row.op, op, arguments)
        if row.op.endswith("_guarded"):
            _same_but_for_float_rows(shared[0], alone[0], *arguments[:2])
        elif row.op in OF_FLOAT_PRODUCTS:
            torch.testing.assert_close(shared, alone, rtol=1e-4, atol=1e-4)
        else:
            assert all(same_bits(s, a) for s, a in zip(shared, alone, strict=True))


def _same_but_for_float_rows(shared: Tensor, alone: Tensor, x: Tensor, w: Tensor) -> None:
    """Rows that a guard leaves float are PyTorch's product, whose BLAS adds up in another order on
    other threads: each of two sums of K products is within K 2^-24 of their magnitudes' sum."""
    moved = 2 * x.shape[-1] * 2.0**-24 * (x.double().abs() @ w.double().abs().t())
    moved += 2.0**-23 * alone.double().abs()  # the bias
    assert ((shared.double() - alone.double()).abs() <= moved).all()
    assert (shared == alone).all(-1).any()  # those in int8


@given(st.data(), ISAS, SEEDS)
def test_leading_axes_are_rows(data: st.DataObject, isa: str, seed: int) -> None:
    shape = data.draw(st.lists(st.integers(0, 4), min_size=0, max_size=4))
    x = torch.randn(*shape, 7, generator=torch.Generator().manual_seed(seed))
    how = (of_rows(torch.ones(5, 7).char()), Layout(5), None, Code(symmetric=0), *FLOAT32)
    with on_isa(isa):
        y = ops.linear_dynamic(x, *how)
        flat = ops.linear_dynamic(x.reshape(x.numel() // 7, 7), *how)
    assert torch.equal(y, flat.reshape(*shape, 5))
