"""qfx.quantize and its companions: every granularity is the definition applied to what shares a
scale, whatever the shape, and nothing is written unless asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import qfx
from qfx.ops.code import Code
from qfx.ops.quantize import code_range
from qfx.ops.quantize import quantize as definition
from tests.conftest import same_bits
from tests.lib.strategies import BITS, DTYPES, FAULTY, FINITE, matrices, step_error

GRANULARITIES = st.sampled_from(
    [
        {"axes": qfx.PER_ROW},
        {"axes": qfx.PER_TENSOR},
        {"axes": qfx.PER_COLUMN},
        {"axes": qfx.PER_ROW, "group": 64},
    ]
)
SPECS = st.builds(lambda how, *kind: qfx.QSpec(*kind, **how), GRANULARITIES, BITS, st.booleans())


def sharing(t: Tensor, spec: qfx.QSpec) -> Iterator[Tensor]:
    """The parts of a matrix that share a scale, in the order of the scales."""
    if spec.axes == qfx.PER_TENSOR:
        yield t
    elif spec.axes == qfx.PER_COLUMN:
        yield from t.unbind(1)
    else:
        yield from (g for row in t.unbind(0) for g in row.split(spec.group or row.numel() or 1))


@given(matrices(fills=FINITE + FAULTY), SPECS, DTYPES)
def test_each_part_is_quantized_by_the_definition(
    x: Tensor, spec: qfx.QSpec, dtype: torch.dtype
) -> None:
    """(Q1)-(Q5), part by part; tests/ops/test_op_quantize.py has rows with faults among others."""
    x = x.to(dtype)
    assume(spec.axes != qfx.PER_TENSOR or bool(x.isfinite().all()))
    before = x.clone()
    quantized = qfx.quantize(x, spec)
    values = qfx.dequantize(quantized)
    assert same_bits(x, before)
    assert quantized.codes.shape == x.shape and values.dtype == torch.float32
    parts = [
        definition(part.reshape(1, -1), Code(spec.bits, spec.symmetric))
        for part in sharing(x, spec)
    ]
    scales, zeros = quantized.scale.flatten(), quantized.zero_point.flatten()
    shared = spec.axes == qfx.PER_TENSOR
    if x.numel():
        assert len(scales) == len(zeros) == (len(x) if shared else len(parts))
    assert not shared or len(scales.unique()) <= 1 >= len(zeros.unique())
    columns = zip(
        parts, sharing(quantized.codes, spec), sharing(values, spec), scales, zeros, strict=False
    )
    for (q, scale, zero), codes, part_values, scale_got, zero_got in columns:
        assert torch.equal(codes.reshape(1, -1), q)
        assert same_bits(scale_got.reshape(1, 1), scale) and zero_got == zero
        assert same_bits(part_values.reshape(1, -1), (q.int() - zero).float() * scale)


@given(matrices(), SPECS)
def test_error_is_at_most_half_a_step(x: Tensor, spec: qfx.QSpec) -> None:
    """(B1), zero is exact, and quantizing values again gives the same codes of symmetric ones."""
    quantized = qfx.quantize(x, spec)
    values = qfx.dequantize(quantized)
    scale = quantized.scale.double()
    if spec.group:
        scale = scale.repeat_interleave(spec.group, -1)[:, : x.shape[1]]
    error = (values.double() - x.double()).abs()
    fits = values.isfinite()
    assert (error <= step_error(scale, spec.bits, spec.symmetric))[fits].all()
    assert (values[x == 0] == 0).all()
    if spec.symmetric and fits.all():
        assert torch.equal(qfx.quantize(values, spec).codes, quantized.codes)


@given(matrices(), st.sampled_from([qfx.PER_TENSOR, qfx.PER_COLUMN]), BITS, st.booleans())
def test_static_scales_clip(x: Tensor, axes: tuple[int, ...], bits: int, symmetric: bool) -> None:
    """(Q6): codes are the nearest ones in the range, also for a range that does not hold zero."""
    spec = qfx.QSpec(bits, symmetric, axes, static=True)
    count = x.shape[1] if axes == qfx.PER_COLUMN else 1
    scale, zero = torch.linspace(0.01, 0.7, count), torch.full((count,), 0 if symmetric else -2)
    got = qfx.quantize(x, spec, scale, None if symmetric else zero.int())
    qmin, qmax = code_range(bits, symmetric)
    wanted = (x / scale.double()).clamp(-1024, 1024)
    near = got.codes.double() - zero.clamp(qmin, qmax)
    inside = (near + zero.clamp(qmin, qmax) > qmin) & (near + zero.clamp(qmin, qmax) < qmax)
    assert ((near - wanted).abs() <= 0.5 + 1e-3)[inside].all()
    assert (got.codes >= qmin).all() and (got.codes <= qmax).all()
    assert ((wanted >= near - 0.501) | (got.codes == qmin)).all()
    assert ((wanted <= near + 0.501) | (got.codes == qmax)).all()


@given(st.lists(st.integers(0, 4), min_size=0, max_size=3), SPECS)
def test_leading_axes_are_rows(shape: list[int], spec: qfx.QSpec) -> None:
    x = torch.randn(*shape, 70, generator=torch.Generator().manual_seed(0))
    got, flat = qfx.quantize(x, spec), qfx.quantize(x.reshape(math.prod(shape), 70), spec)
    assert torch.equal(got.codes, flat.codes.reshape(x.shape))
    assert torch.equal(got.scale.flatten(), flat.scale.flatten())
    assert got.scale.dim() == x.dim()
    assert torch.equal(qfx.dequantize(got), qfx.dequantize(flat).reshape(x.shape))


X = torch.randn(6, 130, generator=torch.Generator().manual_seed(0))
SPEC = qfx.QSpec(bits=4, group=64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_in_place_only_by_name(dtype: torch.dtype) -> None:
    x = X.clone().to(dtype)
    expected = qfx.dequantize(qfx.quantize(x, SPEC), dtype)
    out = torch.empty_like(x)
    assert qfx.dequantize(qfx.quantize(x, SPEC), dtype, out=out) is out
    assert torch.equal(out, expected) and torch.equal(x, X.to(dtype))
    assert qfx.quantize_dequantize_(x, SPEC) is x and torch.equal(x, expected)
    parameter = torch.nn.Parameter(X.clone().to(dtype))
    assert torch.equal(qfx.quantize_dequantize_(parameter, SPEC), expected)


def test_error_is_that_of_the_values() -> None:
    l2, db = qfx.quantization_error(X, SPEC)
    lost = X.double() - qfx.dequantize(qfx.quantize(X, SPEC)).double()
    assert l2 == pytest.approx(float(lost.square().sum().sqrt()))
    assert db == pytest.approx(20 * math.log10(float(X.double().norm()) / l2))
    assert qfx.quantization_error(torch.zeros(3, 4)) == (0.0, math.inf)


@pytest.mark.parametrize("finer", [qfx.QSpec(bits=5, group=64), qfx.QSpec(bits=4, group=64)])
def test_finer_scales_and_more_bits_lose_less(finer: qfx.QSpec) -> None:
    x = X * torch.exp(2 * torch.randn(130, generator=torch.Generator().manual_seed(1)))
    coarser = qfx.QSpec(bits=4, axes=qfx.PER_TENSOR)
    assert qfx.quantization_error(x, finer)[0] < qfx.quantization_error(x, coarser)[0]


CALLS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "scalar": (lambda: qfx.quantize(torch.tensor(1.0)), ValueError, "x is a scalar, expected"),
    "static without a scale": (
        lambda: qfx.quantize(X, qfx.QSpec(axes=qfx.PER_TENSOR, static=True)),
        ValueError,
        "the spec s8T needs a scale",
    ),
    "dynamic with a scale": (
        lambda: qfx.quantize(X, SPEC, torch.ones(1)),
        ValueError,
        "the spec s4g64 finds its scale and zero point itself",
    ),
    "dynamic with a zero point": (
        lambda: qfx.quantize(X, SPEC, zero_point=torch.zeros(1).int()),
        ValueError,
        "finds its scale",
    ),
    "out": (
        lambda: qfx.dequantize(qfx.quantize(X), out=torch.empty(3)),
        ValueError,
        r"out has shape \[3\], expected \[6, 130\]",
    ),
    "double": (lambda: qfx.quantize(X.double()), RuntimeError, "x has dtype Double"),
    "backward": (
        lambda: qfx.dequantize(qfx.quantize(X.clone().requires_grad_())).sum().backward(),
        NotImplementedError,
        "has no gradient",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_errors(name: str) -> None:
    call, kind, phrase = CALLS[name]
    with pytest.raises(kind, match=phrase):
        call()
