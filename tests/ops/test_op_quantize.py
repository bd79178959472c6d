"""The laws of quantization (docs/numerics.md), on every instruction set of this machine."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import qfx._C as _C
from qfx.ops import REFERENCES
from qfx.ops.code import Code
from qfx.ops.layout import Layout
from qfx.ops.quantize import SMALLEST_SCALE, code_range
from tests.conftest import on_isa, same_bits
from tests.lib.pairs import pairs
from tests.lib.strategies import (
    BITS,
    CODES,
    DTYPES,
    FAULTY,
    FINITE,
    ISAS,
    LARGEST,
    OF_ROWS,
    POSITIVE,
    SEEDS,
    matrices,
    step_error,
)  # fmt: skip

ops = torch.ops.qfx
SYMMETRIC = CODES.map(lambda code: code._replace(symmetric=1))


def dequantized(q: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """(Q5)"""
    return ops.dequantize(q, scale, zero_point, None, None, "none", torch.float32)


@given(matrices(fills=FINITE + FAULTY), DTYPES, CODES, ISAS)
def test_quantize_equals_its_reference(x: Tensor, dtype: torch.dtype, code: Code, isa: str) -> None:
    """(Q1)-(Q4) bit for bit, overflow to infinity in half types included."""
    x = x.to(dtype)
    with on_isa(isa):
        got = ops.quantize(x, code)
    expected = REFERENCES["quantize"](x, code)
    assert all(same_bits(g, e) for g, e in zip(got, expected, strict=True))


GIVEN = [0.0, 1e-38, 1e-9, 0.01, 3.0, 1e30, torch.inf, torch.nan]


@pytest.mark.parametrize("bits, scale, isa", pairs([8, 3], GIVEN, _C.isas()), indirect=["isa"])
def test_quantize_by_a_scale_equals_its_reference(bits: int, scale: float, isa: str) -> None:
    """(Q6) bit for bit, however far x is beyond the scale, and whatever the zero point."""
    powers = torch.ldexp(torch.ones(268), torch.arange(-140, 128))
    rows = torch.cat([powers, -powers, 0.7 * powers, -0.7 * powers]).reshape(-1, 67)
    rows[3, 5], rows[7, 66], rows[9, 0] = torch.nan, torch.inf, -torch.inf
    for zero in (None, -300, -128, -4, -1, 0, 1, 3, 127, 300):
        zero_point = None if zero is None else torch.tensor([zero], dtype=torch.int32)
        for x in (rows, rows.bfloat16()):
            arguments = (x, Code(bits, int(zero is None)), torch.tensor([scale]), zero_point)
            got = ops.quantize(*arguments)
            expected = REFERENCES["quantize"](*arguments)
            assert all(same_bits(g, e) for g, e in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    "dtype, symmetric, isa",
    pairs([torch.bfloat16, torch.float16], [1, 0], _C.isas()),
    indirect=["isa"],
)
def test_every_half_precision_input(dtype: torch.dtype, symmetric: int, isa: str) -> None:
    """All 65536 bit patterns, NaN and infinities in rows of their own kind. (Q3) (Q4)"""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = patterns.view(dtype).reshape(-1, 32)
    got = ops.quantize(x, Code(8, symmetric))
    expected = REFERENCES["quantize"](x, Code(8, symmetric))
    assert all(same_bits(g, e) for g, e in zip(got, expected, strict=True))


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_round_to_the_nearest(out_dtype: torch.dtype, isa: str) -> None:
    """One rounding of (E1), ties to even, over all exponents from denormals to overflow."""
    generator = torch.Generator().manual_seed(0)
    powers = torch.arange(-150, 128)[:, None]
    significands = torch.randint(-(2**24), 2**24, (len(powers), 999), generator=generator)
    significands[:, :256] = significands[:, :256] >> 11 << 11 | 1 << 10  # ties of half types
    how = (None, None, None, "none", out_dtype)
    arguments = (significands.int(), torch.ldexp(torch.ones(len(powers), 1), powers), *how)
    assert same_bits(ops.dequantize(*arguments), REFERENCES["dequantize"](*arguments))


@given(matrices(), CODES)
def test_round_trip_error(x: Tensor, code: Code) -> None:
    """(B1), and x^ overflows only for x within half a step of the largest float."""
    q, scale, zero_point = ops.quantize(x, code)
    back, bound = dequantized(q, scale, zero_point), step_error(scale, *code[:2])
    error = (back.double() - x.double()).abs()
    near_the_largest = x.double().abs() + bound > LARGEST
    assert ((error <= bound) | (back.isinf() & near_the_largest)).all()


@given(matrices(), CODES)
def test_zero_is_exact(x: Tensor, code: Code) -> None:
    x = torch.cat([x, torch.zeros(x.shape[0], 1)], 1)
    assert (dequantized(*ops.quantize(x, code))[:, -1] == 0).all()


@given(matrices(), SYMMETRIC)
def test_quantizing_twice_changes_no_code(x: Tensor, code: Code) -> None:
    """Symmetric codes are a fixed point: the largest keeps its place, so the scale returns.

    Denormal groups are left out: where the smallest scale (Q1) holds, the largest code is not qmax.
    So are groups where x^ overflows.
    """
    q, scale, zero_point = ops.quantize(x, code)
    back = dequantized(q, scale, zero_point)
    assume(bool((scale > SMALLEST_SCALE * 128).all()) and bool(back.isfinite().all()))
    again, _, _ = ops.quantize(back, code)
    assert torch.equal(again, q)


@given(matrices(rows=POSITIVE), BITS)
def test_asymmetric_rows_that_use_all_codes_are_fixed_points(x: Tensor, bits: int) -> None:
    """Codes and zero point. With qmin and qmax among the codes, x^ spans n steps again, so the
    scale returns within roundings, which move (q - z) * 255 * 2^-22 at most: no code changes.
    Rounding of the zero point may leave an end unused; then n - 1 steps make a smaller scale.
    """
    qmin, qmax = code_range(bits, False)
    q, scale, zero_point = ops.quantize(x, Code(bits, 0))
    back = dequantized(q, scale, zero_point)
    full = (q == qmin).any(1) & (q == qmax).any(1) & back.isfinite().all(1)
    full &= scale[:, 0] > SMALLEST_SCALE * 256
    again, _, zero_again = ops.quantize(back, Code(bits, 0))
    assert torch.equal(again[full], q[full])
    assert torch.equal(zero_again[full], zero_point[full])


@given(matrices(), CODES)
def test_a_second_round_trip_is_bounded_by_the_first(x: Tensor, code: Code) -> None:
    """Quantizing x^ moves it by (B1) of its own scale, which is no larger than the first one but
    for roundings of (Q2) and (Q5), 8 half-ulps."""
    q, scale, zero_point = ops.quantize(x, code)
    back = dequantized(q, scale, zero_point)
    assume(bool(back.isfinite().all()))
    again = ops.quantize(back, code)
    assert (again[1] <= scale.double() * (1 + 8 * 2.0**-24)).all()
    twice = dequantized(*again)
    assume(bool(twice.isfinite().all()))
    assert ((twice.double() - back).abs() <= step_error(again[1], *code[:2])).all()


@given(matrices(), OF_ROWS, st.integers(-10, 10))
def test_powers_of_two_scale_the_scale_only(x: Tensor, code: Code, power: int) -> None:
    big = x.abs().amax() if x.numel() else torch.tensor(0.0)
    small = x.abs()[x != 0].amin() if (x != 0).any() else torch.tensor(1.0)
    assume(float(big) < 2.0**100 and float(small) > 2.0**-90)
    q, scale, zero_point = ops.quantize(x, code)
    q2, scale2, zero_point2 = ops.quantize(x * 2.0**power, code)
    assert torch.equal(q, q2) and torch.equal(zero_point, zero_point2)
    moved = scale > SMALLEST_SCALE
    assert torch.equal(scale2[moved], scale[moved] * 2.0**power)


@given(matrices(rows=POSITIVE, fills=FINITE + FAULTY), OF_ROWS, SEEDS)
def test_rows_are_independent(x: Tensor, code: Code, seed: int) -> None:
    row = seed % x.shape[0]
    alone = ops.quantize(x[row : row + 1], code)
    together = ops.quantize(x, code)
    assert all(same_bits(a, t[row : row + 1]) for a, t in zip(alone, together, strict=True))


@given(matrices(), st.integers(2, 7), st.integers(0, 1))
def test_more_bits_never_raise_the_bound(x: Tensor, bits: int, symmetric: int) -> None:
    """Of groups above the smallest scale."""
    scale = ops.quantize(x, Code(bits, symmetric))[1]
    coarse = step_error(scale, bits, bool(symmetric))
    fine = step_error(ops.quantize(x, Code(bits + 1, symmetric))[1], bits + 1, bool(symmetric))
    assert (fine <= coarse)[scale > SMALLEST_SCALE].all()


BAD = st.sampled_from([torch.nan, torch.inf, -torch.inf])


@given(matrices(rows=POSITIVE), BAD, DTYPES, CODES, ISAS)
def test_nan_and_infinity_stay_in_their_rows(
    x: Tensor, bad: float, dtype: torch.dtype, code: Code, isa: str
) -> None:
    """(Q4) through a whole linear: NaN in the row of the fault, and in all others the same bits as
    if that one were zero, also where they share a scale."""
    assume(x.shape[1] > 0)
    m, k = x.shape
    row = m // 2
    faulty, clean = x.to(dtype).clone(), x.to(dtype).clone()
    faulty[row, k // 2], clean[row] = bad, 0
    weight = ops.pack_weight(torch.ones(5, k, dtype=torch.int8), torch.ones(5))
    how = (weight, Layout(5), None, code, "none", torch.float32)
    with on_isa(isa):
        y, expected = (ops.linear_dynamic(v, *how) for v in (faulty, clean))
    others = torch.arange(m) != row
    assert y[row].isnan().all() and same_bits(y[others], expected[others])


@given(matrices(rows=POSITIVE), BAD, CODES, ISAS)
def test_codes_of_rows_with_a_fault(x: Tensor, bad: float, code: Code, isa: str) -> None:
    """(Q4): all zero, and a scale that is the fault; all rows may have one."""
    assume(x.shape[1] > 0)
    x = x.clone()
    x[::2, -1] = bad
    axes = [0, 1] if code.per_tensor else [1]
    with on_isa(isa):
        q, scale, zero_point = ops.quantize(x, code)
        values = ops.fake_quantize(x, axes, code.bits, bool(code.symmetric), torch.float32)
    assert not q[::2].any() and not zero_point[::2].any()
    assert same_bits(scale[::2], torch.full_like(scale[::2], abs(bad)))
    assert values[::2].isnan().all() and scale[1::2].isfinite().all()
    assert not code.per_tensor or len(scale[1::2].unique()) <= 1
