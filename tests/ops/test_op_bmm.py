"""The laws of the batched product (G2), on every instruction set of this machine."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import qfx  # noqa: F401
from qfx.ops import REFERENCES
from qfx.ops.code import Code
from qfx.ops.layout import Layout
from tests.conftest import on_isa, on_threads, same_bits
from tests.lib.pairs import every
from tests.lib.strategies import (
    AXES,
    BITS,
    DTYPES,
    FAULTY,
    FINITE,
    ISAS,
    LAYOUTS,
    POSITIVE,
    SEEDS,
    SIZES,
    codes,
    filled,
    step_error,
    strided,
)  # fmt: skip

ops = torch.ops.qfx
BATCHES = st.sampled_from([(), (1,), (3,), (2, 3), (0,), (2, 0, 3), (2, 1, 2)])
THREADS = st.sampled_from([1, 2])


def _code(axes: list[int], bits: int, symmetric: bool) -> Code:
    return Code(bits, int(symmetric), int(axes == [0, 1]))


def count_of(batch: tuple[int, ...]) -> int:
    return torch.Size(batch).numel()


def batched(t: Tensor, batch: tuple[int, ...], rows: int, layout: str) -> Tensor:
    """[count * rows, columns] -> [*batch, rows, columns]: in "heads" the rows lie outermost in
    memory, which is how attention splits its features; "expanded" repeats one row instead."""
    t = t.reshape(*batch, rows, t.shape[1])
    if layout == "contiguous":
        return t
    if layout == "heads":
        return t.movedim(-2, 0).contiguous().movedim(0, -2)
    if layout == "transposed":
        return t.mT.contiguous().mT
    if layout == "gaps":
        return torch.stack([t, t], -1)[..., 0]
    return t[..., :1, :].expand(t.shape)


LAYOUT_NAMES = ["contiguous", "heads", "transposed", "gaps", "expanded"]
LAYOUTS_OF_BATCHES = st.sampled_from(LAYOUT_NAMES)


@st.composite
def batches(
    draw: st.DrawFn, batch: tuple[int, ...], rows: int, columns: int, fills: tuple[str, ...]
) -> Tensor:
    """float32 [*batch, rows, columns] of some fill and layout."""
    generator = torch.Generator().manual_seed(draw(SEEDS))
    x = filled(draw(st.sampled_from(fills)), count_of(batch) * rows, columns, generator)
    return batched(x, batch, rows, draw(LAYOUTS_OF_BATCHES))


@given(st.data(), BATCHES, SIZES, SIZES, SIZES, LAYOUTS_OF_BATCHES, LAYOUTS_OF_BATCHES, ISAS)
def test_batched_product_is_exact(
    data: st.DataObject, batch: tuple[int, ...], m: int, k: int, n: int, of_a: str, of_b: str,
    isa: str,
) -> None:  # fmt: skip
    """(G2), -128 on both sides included, from any strides."""
    count = count_of(batch)
    a = batched(data.draw(codes(count * m, k)), batch, m, of_a)
    b = batched(data.draw(codes(count * n, k)), batch, n, of_b)
    zero_point = data.draw(codes(count * m, 1)).int().reshape(*batch, m, 1)
    with on_isa(isa):
        acc = ops.int8_bmm(a, zero_point, b)
    assert torch.equal(acc.long(), (a.long() - zero_point) @ b.long().mT)
    assert torch.equal(acc, REFERENCES["int8_bmm"](a, zero_point, b))


@pytest.mark.parametrize("code, zero", [(-128, 127), (127, -128), (-128, -128), (127, 127)])
def test_longest_k_does_not_overflow(code: int, zero: int, isa: str) -> None:
    """At K = 65792 with all products of one sign."""
    k = 65792
    a = torch.full((2, 3, k), code, dtype=torch.int8)
    zero_point = torch.full((1, 1, 1), zero, dtype=torch.int32)
    b = torch.full((2, 2, k), -128, dtype=torch.int8)
    assert (ops.int8_bmm(a, zero_point, b) == k * (code - zero) * -128).all()


@given(
    st.data(), BATCHES, SIZES, SIZES, SIZES, DTYPES, DTYPES, DTYPES, AXES, BITS, st.booleans(),
    BITS, ISAS, THREADS,
)  # fmt: skip
def test_all_forms_give_the_same_bits(
    data: st.DataObject, batch: tuple[int, ...], m: int, k: int, n: int, a_dtype: torch.dtype,
    b_dtype: torch.dtype, out: torch.dtype, axes: list[int], bits: int, symmetric: bool,
    b_bits: int, isa: str, threads: int,
) -> None:  # fmt: skip
    """int8_bmm_dynamic == dequantize(int8_bmm(quantize, quantize)) == its reference, bit for bit,
    from any layout, with NaN and infinities."""
    a = data.draw(batches(batch, m, k, FINITE + FAULTY)).to(a_dtype)
    b = data.draw(batches(batch, n, k, FINITE + FAULTY)).to(b_dtype)
    how = (axes, bits, symmetric, b_bits, out)
    with on_isa(isa), on_threads(threads):
        fused = ops.int8_bmm_dynamic(a, b, *how)
        a_q, a_scale, a_zero = ops.quantize(a, _code(axes, bits, symmetric))
        b_q, b_scale, _ = ops.quantize(b, Code(b_bits))
        acc = ops.int8_bmm(a_q, a_zero, b_q)
        composed = ops.dequantize(acc, a_scale, None, b_scale.mT, None, "none", out)
    assert same_bits(fused, REFERENCES["int8_bmm_dynamic"](a, b, *how))
    assert same_bits(fused, composed)


@pytest.mark.parametrize("axes, layout", every([[1], [0, 1]], [*LAYOUT_NAMES, "within"]), ids=str)
def test_where_the_operands_lie_changes_nothing(layout: str, axes: list[int]) -> None:
    """What lies beside them in memory is larger than they are."""
    x = torch.randn(6 * 5, 8, generator=torch.Generator().manual_seed(0))
    x = x * torch.linspace(1, 9, 30)[:, None]
    if layout == "within":
        a = x.reshape(2, 3, 5, 8)[:, :2, :3, :6]
    else:
        a = batched(x, (2, 3), 5, layout)[:, :2, :3]
    how = (axes, 8, False, 8, torch.float32)
    alone = a.clone(memory_format=torch.contiguous_format)
    expected = REFERENCES["int8_bmm_dynamic"](alone, alone, *how)
    assert same_bits(ops.int8_bmm_dynamic(a, a, *how), expected)
    assert same_bits(ops.int8_bmm_dynamic(alone, alone, *how), expected)


@given(st.data(), POSITIVE, SIZES, SIZES, st.booleans(), ISAS)
def test_each_matrix_is_by_itself(
    data: st.DataObject, m: int, k: int, n: int, symmetric: bool, isa: str
) -> None:
    """A batch is its matrices, one after another; one matrix is linear_dynamic."""
    a = data.draw(batches((3,), m, k, FINITE + FAULTY))
    b = data.draw(batches((3,), n, k, FINITE + FAULTY))
    with on_isa(isa):
        y = ops.int8_bmm_dynamic(a, b, [1], 8, symmetric, 8, torch.float32)
        for i in range(3):
            b_q, b_scale, _ = ops.quantize(b[i], Code())
            code, end = Code(8, int(symmetric)), ("none", torch.float32)
            linear = (ops.pack_weight(b_q, b_scale), Layout(n), None, code, *end)
            assert same_bits(y[i], ops.linear_dynamic(a[i], *linear))


@given(
    st.data(), POSITIVE, POSITIVE, POSITIVE, DTYPES, LAYOUTS_OF_BATCHES, ISAS,
    st.sampled_from([torch.nan, torch.inf, -torch.inf]), AXES,
)  # fmt: skip
def test_nan_and_infinity_stay_in_their_row_and_column(
    data: st.DataObject, m: int, k: int, n: int, dtype: torch.dtype, layout: str, isa: str,
    bad: float, axes: list[int],
) -> None:  # fmt: skip
    """(F9): a faulty element of a takes its row of y with it, one of b its column, no others, also
    where all rows of a have one scale."""
    a = data.draw(batches((2,), m, k, ("normal",))).to(dtype).contiguous()
    b = data.draw(batches((2,), n, k, ("normal",))).to(dtype).contiguous()
    faulty_a, faulty_b = a.clone(), b.clone()
    faulty_a[1, m // 2, k // 2], a[1, m // 2] = bad, 0
    faulty_b[1, n // 3, k // 3] = bad
    if layout == "transposed":
        b, faulty_b = b.mT.contiguous().mT, faulty_b.mT.contiguous().mT
    how = (axes, 8, False, 8, torch.float32)
    with on_isa(isa):
        y = ops.int8_bmm_dynamic(faulty_a, faulty_b, *how)
        clean = ops.int8_bmm_dynamic(a, b, *how)
    fault = torch.zeros(2, m, n, dtype=torch.bool)
    fault[1, m // 2] = fault[1, :, n // 3] = True
    assert y[fault].isnan().all() and same_bits(y[~fault], clean[~fault])


@given(st.data(), BATCHES, POSITIVE, POSITIVE, POSITIVE, AXES, BITS, st.booleans(), BITS)
def test_a_priori_bound(
    data: st.DataObject, batch: tuple[int, ...], m: int, k: int, n: int, axes: list[int],
    bits: int, symmetric: bool, b_bits: int,
) -> None:  # fmt: skip
    """(B2) with both operands' errors, in float64 from the data; the last term is that of (E1)."""
    a = data.draw(batches(batch, m, k, ("normal", "wide", "one_sided", "outlier")))
    b = data.draw(batches(batch, n, k, ("normal", "zero_rows", "one_sided", "outlier")))
    y = ops.int8_bmm_dynamic(a, b, axes, bits, symmetric, b_bits, torch.float32).double()
    e_a = step_error(ops.quantize(a, _code(axes, bits, symmetric))[1], bits, symmetric)
    e_a = e_a.expand(*batch, m, 1)
    e_b = step_error(ops.quantize(b, Code(b_bits))[1], b_bits, True).mT
    size_a, size_b = a.double().abs().sum(-1, keepdim=True), b.double().abs().sum(-1)[..., None, :]
    bound = size_a * e_b + size_b * e_a + k * e_a * e_b
    exact = a.double() @ b.double().mT
    assert ((y - exact).abs() <= bound + 4 * 2.0**-24 * (exact.abs() + bound) + 1e-37).all()


@given(st.data(), SIZES, SIZES, SIZES, LAYOUTS, ISAS)
def test_column_scales_of_matrices_and_of_columns_agree(
    data: st.DataObject, m: int, n: int, batch: int, layout: str, isa: str
) -> None:
    """dequantize with scales [B, 1, N] is dequantize with [N], matrix by matrix. (E1)"""
    acc = data.draw(codes(batch * m, n)).int().reshape(batch, m, n) * 1000
    scale = torch.linspace(0.1, 2, batch * m).reshape(batch, m, 1)
    col_scale = strided(torch.linspace(0.01, 3, batch * n).reshape(batch, n), layout)
    how = (None, "none", torch.float32)
    with on_isa(isa):
        y = ops.dequantize(acc, scale, None, col_scale[:, None], *how)
        each = [ops.dequantize(acc[i], scale[i], None, col_scale[i], *how) for i in range(batch)]
    assert all(same_bits(y[i], e) for i, e in enumerate(each))


# --- bad arguments ---

A, B = torch.ones(2, 3, 4), torch.ones(2, 5, 4)
LONG = torch.zeros(1, 1, 65793, dtype=torch.int8)
A_Q, B_Q, ZERO = A.char(), B.char(), torch.zeros(2, 3, 1, dtype=torch.int32)


def dynamic(a: Tensor = A, b: Tensor = B, **other: Any) -> Tensor:
    how = {"axes": [1], "bits": 8, "symmetric": True, "b_bits": 8, "out_dtype": torch.float32}
    return ops.int8_bmm_dynamic(a, b, *{**how, **other}.values())


def scaled(col_scale: Tensor) -> Tensor:
    acc = torch.zeros(2, 3, 5, dtype=torch.int32)
    return ops.dequantize(acc, torch.ones(1), None, col_scale, None, "none", torch.float32)


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "batch": (
        lambda: dynamic(b=torch.ones(3, 5, 4)),
        "int8_bmm_dynamic: a has shape 2x3x4 and b has shape 3x5x4, expected [*B, M, K] and "
        "[*B, N, K] with the same batch axes",
    ),
    "axes_of_batch": (lambda: dynamic(b=B[0]), "b has shape 5x4, expected [*B, M, K]"),
    "vector": (lambda: dynamic(a=A[0, 0], b=B[0, 0]), "a has shape 4 and b has shape 4"),
    "k": (
        lambda: dynamic(b=torch.ones(2, 5, 7)),
        "int8_bmm_dynamic: a has K=4 (shape 2x3x4) but b has K=7 (shape 2x5x7)",
    ),
    "k_of_codes": (
        lambda: ops.int8_bmm(A_Q, ZERO, B_Q[..., :3]),
        "int8_bmm: a_q has K=4 (shape 2x3x4) but b_q has K=3 (shape 2x5x3)",
    ),
    "long_k": (lambda: ops.int8_bmm(LONG, ZERO[:1, :1], LONG), "K=65793 is above 65792"),
    "float_codes": (lambda: ops.int8_bmm(A, ZERO, B_Q), "a_q has dtype Float, expected Char"),
    "float_b_codes": (lambda: ops.int8_bmm(A_Q, ZERO, B), "b_q has dtype Float, expected Char"),
    "zero_type": (lambda: ops.int8_bmm(A_Q, ZERO.long(), B_Q), "zero_point has dtype Long"),
    "zero_count": (
        lambda: ops.int8_bmm(A_Q, ZERO[0], B_Q),
        "zero_point has 3 elements, expected one for each of the 6 rows or a single one",
    ),
    "double": (lambda: dynamic(a=A.double()), "a has dtype Double, expected Float or BFloat16"),
    "integer_b": (lambda: dynamic(b=B_Q), "b has dtype Char, expected Float"),
    "bits": (lambda: dynamic(bits=9), "bits=9 is outside 2..8"),
    "b_bits": (lambda: dynamic(b_bits=1), "bits=1 is outside 2..8"),
    "axes": (lambda: dynamic(axes=[0]), "axes=[0], expected [1]"),
    "out_dtype": (lambda: dynamic(out_dtype=torch.int8), "out_dtype is Char"),
    "col_scale": (
        lambda: scaled(torch.ones(3, 1, 5)),
        "dequantize: col_scale has shape 3x1x5 and q has shape 2x3x5, expected [N], or [*B, 1, N]",
    ),
    "col_scale_rows": (lambda: scaled(torch.ones(2, 3, 5)), "col_scale has shape 2x3x5 and q"),
}


@pytest.mark.parametrize("name", CALLS)
def test_error_sentence(name: str) -> None:
    call, phrase = CALLS[name]
    with pytest.raises(RuntimeError, match=re.escape(phrase)):
        call()
