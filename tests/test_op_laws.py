"""The laws of the operators (docs/numerics.md), on every instruction set of this machine."""

from __future__ import annotations

from typing import Any

import qfx._C as _C
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from qfx.ops import REFERENCES
from qfx.ops.quantize import SMALLEST_SCALE, code_range
from tests.rows import ACTIVATIONS
from tests.strategies import DTYPES, LAYOUTS, POSITIVE, SEEDS, SIZES, codes, matrices, strided

ops = torch.ops.qfx
ISAS = st.sampled_from(_C.isas())
BITS = st.integers(2, 8)
AXES = st.sampled_from([[1], [0, 1]])


def on_isa(name: str, function: Any, *arguments: Any) -> Any:
    before = _C.isa()
    _C.set_isa(name)
    try:
        return function(*arguments)
    finally:
        _C.set_isa(before)


def dequantized(q: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    return ops.dequantize(q, scale, zero_point, None, None, "none", torch.float32)


def step_error(scale: Tensor, bits: int, symmetric: bool) -> Tensor:
    """(B1)"""
    qmin, qmax = code_range(bits, symmetric)
    return scale.double() * (0.5 + (qmax - qmin) * 2.0**-21)


# --- the integer product ---


@given(st.data(), SIZES, SIZES, SIZES, ISAS)
def test_integer_product_is_exact(data: st.DataObject, m: int, k: int, n: int, isa: str) -> None:
    """(G1), -128 on both sides included."""
    q, w = data.draw(codes(m, k)), data.draw(codes(n, k))
    zero_point = data.draw(codes(m, 1)).int()
    packed = on_isa(isa, ops.pack_weight, w)
    acc = on_isa(isa, ops.int8_mm, q, zero_point, packed, n)
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
    acc = on_isa(isa, ops.int8_mm, q, zero_point, ops.pack_weight(w), n)
    assert (acc == k * (code + 1 + zero) * -128).all()


@given(st.data(), SIZES, SIZES)
def test_unpack_is_the_inverse_of_pack(data: st.DataObject, n: int, k: int) -> None:
    w = data.draw(codes(n, k))
    packed = ops.pack_weight(w)
    assert torch.equal(packed, REFERENCES["pack_weight"](w))
    assert torch.equal(ops.unpack_weight(packed, n, k), w)


@given(st.data(), POSITIVE, POSITIVE, POSITIVE, SEEDS)
def test_permuting_k_changes_nothing(
    data: st.DataObject, m: int, k: int, n: int, seed: int
) -> None:
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(seed))
    w = data.draw(codes(n, k))
    order = torch.randperm(k, generator=torch.Generator().manual_seed(seed))

    def run(x: Tensor, w: Tensor) -> Tensor:
        scale = torch.full((n,), 0.01)
        how = ([1], 8, False, "none", torch.float32)
        return ops.int8_linear_dynamic(x, ops.pack_weight(w), scale, None, *how)

    assert torch.equal(run(x, w), run(x[:, order], w[:, order]))


# --- quantization ---


@given(matrices(), DTYPES, AXES, BITS, st.booleans(), ISAS)
def test_quantize_equals_its_reference(
    x: Tensor, dtype: torch.dtype, axes: list[int], bits: int, symmetric: bool, isa: str
) -> None:
    """(Q1)-(Q4) bit for bit, overflow to infinity in half types included."""
    x = x.to(dtype)
    got = on_isa(isa, ops.quantize, x, axes, bits, symmetric)
    expected = REFERENCES["quantize"](x, axes, bits, symmetric)
    for g, e in zip(got, expected, strict=True):
        assert torch.equal(g.double().nan_to_num(-1), e.double().nan_to_num(-1))


@given(matrices(), AXES, BITS, st.booleans())
def test_round_trip_error(x: Tensor, axes: list[int], bits: int, symmetric: bool) -> None:
    """(B1)"""
    q, scale, zero_point = ops.quantize(x, axes, bits, symmetric)
    error = (dequantized(q, scale, zero_point).double() - x.double()).abs()
    assert (error <= step_error(scale, bits, symmetric)).all()


@given(matrices(), BITS, st.booleans())
def test_zero_is_exact(x: Tensor, bits: int, symmetric: bool) -> None:
    x = torch.cat([x, torch.zeros(x.shape[0], 1)], 1)
    assert (dequantized(*ops.quantize(x, [1], bits, symmetric))[:, -1] == 0).all()


@given(matrices(), AXES, BITS)
def test_quantizing_twice_changes_no_code(x: Tensor, axes: list[int], bits: int) -> None:
    """Symmetric codes are a fixed point: the largest keeps its place, so the scale returns.

    Denormal groups are left out: where the smallest scale (Q1) holds, the largest code is not qmax.
    """
    q, scale, zero_point = ops.quantize(x, axes, bits, True)
    assume(bool((scale > SMALLEST_SCALE * 128).all()))
    again, _, _ = ops.quantize(dequantized(q, scale, zero_point), axes, bits, True)
    assert torch.equal(again, q)


@given(matrices(), BITS, st.booleans(), st.integers(-10, 10))
def test_powers_of_two_scale_the_scale_only(
    x: Tensor, bits: int, symmetric: bool, power: int
) -> None:
    big = x.abs().amax() if x.numel() else torch.tensor(0.0)
    small = x.abs()[x != 0].amin() if (x != 0).any() else torch.tensor(1.0)
    assume(float(big) < 2.0**100 and float(small) > 2.0**-90)
    q, scale, zero_point = ops.quantize(x, [1], bits, symmetric)
    q2, scale2, zero_point2 = ops.quantize(x * 2.0**power, [1], bits, symmetric)
    assert torch.equal(q, q2) and torch.equal(zero_point, zero_point2)
    moved = scale > SMALLEST_SCALE
    assert torch.equal(scale2[moved], scale[moved] * 2.0**power)


@given(matrices(rows=POSITIVE), BITS, st.booleans(), SEEDS)
def test_rows_are_independent(x: Tensor, bits: int, symmetric: bool, seed: int) -> None:
    row = seed % x.shape[0]
    alone = ops.quantize(x[row : row + 1], [1], bits, symmetric)
    together = ops.quantize(x, [1], bits, symmetric)
    for a, t in zip(alone, together, strict=True):
        assert torch.equal(a, t[row : row + 1])


@given(matrices(), st.integers(2, 7), st.booleans())
def test_more_bits_never_raise_the_bound(x: Tensor, bits: int, symmetric: bool) -> None:
    """Of groups above the smallest scale."""
    scale = ops.quantize(x, [1], bits, symmetric)[1]
    coarse = step_error(scale, bits, symmetric)
    fine = step_error(ops.quantize(x, [1], bits + 1, symmetric)[1], bits + 1, symmetric)
    assert (fine <= coarse)[scale > SMALLEST_SCALE].all()


@given(matrices(rows=POSITIVE), st.sampled_from([torch.nan, torch.inf, -torch.inf]), ISAS)
def test_nan_and_infinity_stay_in_their_rows(x: Tensor, bad: float, isa: str) -> None:
    """(Q4) through a whole linear."""
    assume(x.shape[1] > 0)
    m, k = x.shape
    x = x.clone()
    x[m // 2, k // 2] = bad
    w, scale = torch.ones(5, k, dtype=torch.int8), torch.ones(5)
    how = (None, [1], 8, False, "none", torch.float32)
    y = on_isa(isa, ops.int8_linear_dynamic, x, ops.pack_weight(w), scale, *how)
    assert y[m // 2].isnan().all()
    assert y.isfinite().all(1).sum() >= (x.abs().amax(1) < 1e30).sum()


# --- the quantized linear ---


@given(matrices(), POSITIVE, BITS, st.booleans(), AXES, SEEDS)
def test_a_priori_bound(
    x: Tensor, n: int, bits: int, symmetric: bool, axes: list[int], seed: int
) -> None:
    """(B2), in float64 from the data; the last term is the rounding of (E1)."""
    assume(x.numel() == 0 or float(x.abs().amax()) < 1e30)
    k = x.shape[1]
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
    w_q, w_scale, _ = ops.quantize(w, [1], 8, True)
    packed = ops.pack_weight(w_q)
    how = (None, axes, bits, symmetric, "none", torch.float32)
    y = ops.int8_linear_dynamic(x, packed, w_scale.reshape(-1), *how).double()
    e_x = step_error(ops.quantize(x, axes, bits, symmetric)[1], bits, symmetric)
    e_x = e_x.expand(x.shape[0], 1)
    e_w = step_error(w_scale, 8, True).reshape(1, n)
    size_x, size_w = x.double().abs().sum(1, keepdim=True), w.double().abs().sum(1)
    bound = size_x * e_w + size_w * e_x + k * e_x * e_w
    exact = x.double() @ w.double().t()
    assert ((y - exact).abs() <= bound + 4 * 2.0**-24 * (exact.abs() + bound) + 1e-37).all()


@given(
    st.data(), matrices(), SIZES, DTYPES, DTYPES, AXES, BITS, st.booleans(), ISAS,
    st.sampled_from(ACTIVATIONS), st.booleans(), st.sampled_from([1, 2]), LAYOUTS,
)  # fmt: skip
def test_fused_forms_give_the_same_bits(
    data: st.DataObject, x: Tensor, n: int, dtype: torch.dtype, out: torch.dtype, axes: list[int],
    bits: int, symmetric: bool, isa: str, activation: str, with_bias: bool, threads: int,
    layout: str,
) -> None:  # fmt: skip
    """int8_linear_dynamic == int8_linear(quantize) == dequantize(int8_mm(quantize)), on every
    instruction set and thread count, from any memory layout."""
    x, w = strided(x.to(dtype), layout), data.draw(codes(n, x.shape[1]))
    packed, w_scale = ops.pack_weight(w), torch.linspace(0.001, 0.02, n)
    bias = torch.linspace(-2, 2, n) if with_bias else None
    epilogue = (bias, activation, out)

    def three_forms() -> list[Tensor]:
        q, scale, zero_point = ops.quantize(x, axes, bits, symmetric)
        acc = ops.int8_mm(q, zero_point, packed, n)
        how = (bias, axes, bits, symmetric, activation, out)
        return [
            ops.int8_linear_dynamic(x, packed, w_scale, *how),
            ops.int8_linear(q, scale, zero_point, packed, w_scale, *epilogue),
            ops.dequantize(acc, scale, None, w_scale, *epilogue),
        ]

    torch.set_num_threads(threads)
    forms = on_isa(isa, three_forms) + on_isa("ref", three_forms)[:1]
    torch.set_num_threads(2)
    first = forms[0].view(torch.int16 if out != torch.float32 else torch.int32)
    finite = forms[0].isfinite()
    for form in forms[1:]:
        assert torch.equal(form.view(first.dtype)[finite], first[finite])
        assert torch.equal(form.isfinite(), finite)


@given(st.data(), ISAS, SEEDS)
def test_leading_axes_are_rows(data: st.DataObject, isa: str, seed: int) -> None:
    shape = data.draw(st.lists(st.integers(0, 4), min_size=0, max_size=4))
    x = torch.randn(*shape, 7, generator=torch.Generator().manual_seed(seed))
    packed, scale = ops.pack_weight(torch.ones(5, 7, dtype=torch.int8)), torch.ones(5)
    how = (None, [1], 8, False, "none", torch.float32)
    y = on_isa(isa, ops.int8_linear_dynamic, x, packed, scale, *how)
    flat = on_isa(isa, ops.int8_linear_dynamic, x.reshape(x.numel() // 7, 7), packed, scale, *how)
    assert torch.equal(y, flat.reshape(*shape, 5))
