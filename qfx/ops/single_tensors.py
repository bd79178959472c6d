"""Functions that quantize and dequantize one tensor outside of any model, and measure the error.

A `QSpec` says how: bits, symmetric or not, and which elements share a scale. A tensor [..., K] is
treated as the matrix [rows, K]. The operators compute one scale for each row of their input, so the
elements that share a scale are first arranged as rows: the matrix stays as it is, is transposed
(`PER_COLUMN`), or each of its groups becomes a row. Equations: docs/numerics.md.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qfx.ops.code import code_of
from qfx.ops.storage import quantize_to_half
from qfx.values.scheme import PER_COLUMN, QSpec

ops = torch.ops.qfx


class Quantized(NamedTuple):
    """Integers and the values that they represent: (codes - zero_point) * scale. (Q5)

    `codes`: int8 [..., K]. `scale` float32, `zero_point` int32: [..., 1] per row and per tensor,
    where they are the same for all rows except those with a NaN or an infinity, [1, ..., K] per
    column, [..., ceil(K / group)] in groups.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor
    spec: QSpec


def quantize(
    x: Tensor,
    spec: QSpec | None = None,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
) -> Quantized:
    """Returns the codes of `x` [..., K], float32, bfloat16 or float16. `x` is not changed.
    (Q1)-(Q4), (Q6)

        codes, scale, zero_point, spec = qfx.quantize(x, qfx.QSpec(bits=4, group=32))

    `scale` (float32, one, or [K] per column) and `zero_point` (int32, the same) are for a static
    `spec`, and only for it. The codes are constants to autograd: a backward through them is an
    error. Raises ValueError for a scalar `x` and for a missing or superfluous scale.
    """
    spec = spec or QSpec()
    if not x.dim():
        raise ValueError("quantize: x is a scalar, expected [..., K]")
    if spec.static != (scale is not None) or (zero_point is not None and not spec.static):
        wanted = "needs a scale" if spec.static else "finds its scale and zero point itself"
        raise ValueError(f"quantize: the spec {spec} {wanted}")
    rows = _rows(x, spec)
    if scale is None:
        found = _chosen(rows, spec)
    else:
        found = ops.quantize(rows, code_of(spec), scale, zero_point)
    codes, row_scale, row_zero = found
    shape = _scale_shape(x, spec)
    return Quantized(
        _matrix(codes, x, spec), row_scale.reshape(shape), row_zero.reshape(shape), spec
    )


def _chosen(rows: Tensor, spec: QSpec) -> tuple[Tensor, Tensor, Tensor]:
    if spec.packed:
        return quantize_to_half(rows, spec.bits, spec.symmetric)
    return ops.quantize(rows, code_of(replace(spec, group=0)))  # type: ignore[no-any-return]


def dequantize(
    quantized: Quantized, dtype: torch.dtype = torch.float32, out: Tensor | None = None
) -> Tensor:
    """Returns the values [..., K] that the codes represent, in `out` if it is given. (Q5)

        x_hat = qfx.dequantize(qfx.quantize(x))

    Raises ValueError for an `out` of another shape.
    """
    codes, scale, zero_point, spec = quantized
    rows = _rows(codes, spec)
    x = ops.dequantize(rows, scale, zero_point, None, None, "none", dtype)
    x = _matrix(x, codes, spec)
    if out is None:
        return x
    if out.shape != x.shape:
        raise ValueError(f"dequantize: out has shape {list(out.shape)}, expected {list(x.shape)}")
    return out.copy_(x)


@torch.no_grad()
def quantize_dequantize_(x: Tensor, spec: QSpec | None = None) -> Tensor:
    """Replaces `x` [..., K], in place, by the values that its codes represent, and returns it.

        x_hat = qfx.quantize_dequantize_(x.clone(), qfx.QSpec(bits=4))

    Raises the errors of `quantize`.
    """
    return dequantize(quantize(x, spec), x.dtype, out=x)


@torch.no_grad()
def quantization_error(x: Tensor, spec: QSpec | None = None) -> tuple[float, float]:
    """Returns (l2, sqnr_db), the error of quantizing `x` [..., K], computed in float64.

        l2, sqnr_db = qfx.quantization_error(x, qfx.QSpec(bits=4, group=32))

    l2 = ||x - x^||, in units of x; sqnr_db = 20 log10(||x|| / l2) in dB, infinite if nothing is
    lost. Raises the errors of `quantize`.
    """
    exact, values = x.double(), dequantize(quantize(x, spec))
    return float((exact - values.double()).norm()), sqnr(exact, values)


def _rows(x: Tensor, spec: QSpec) -> Tensor:
    """Reshapes x [..., K] so that elements with the same scale form a row."""
    if spec.axes == PER_COLUMN:
        return x.reshape(x.shape[:-1].numel(), x.shape[-1]).t()
    if spec.group:
        groups = -(-x.shape[-1] // spec.group)
        padded = F.pad(x, (0, groups * spec.group - x.shape[-1]))  # every range holds zero
        return padded.reshape(*x.shape[:-1], groups, spec.group)
    return x


def _matrix(rows: Tensor, like: Tensor, spec: QSpec) -> Tensor:
    """Inverts `_rows`: returns [..., K] of the shape of `like`."""
    if spec.axes == PER_COLUMN:
        return rows.t().reshape(like.shape)
    if spec.group:
        return rows.flatten(-2)[..., : like.shape[-1]].contiguous()
    return rows


def _scale_shape(x: Tensor, spec: QSpec) -> tuple[int, ...]:
    if spec.axes == PER_COLUMN:
        return (*(1,) * (x.dim() - 1), x.shape[-1])
    return (*x.shape[:-1], -(-x.shape[-1] // spec.group) if spec.group else 1)


def sqnr(signal: Tensor, noisy: Tensor) -> float:
    """Returns the signal-to-quantization-noise ratio in dB, 10 log10(sum s^2 / sum (s - n)^2).

        print(qfx.sqnr(model(x), compiled(x)))

    `signal` and `noisy` have the same shape. The ratio is infinite if they are equal.
    """
    s, n = signal.double(), noisy.double()
    noise, power = (s - n).square().sum().item(), s.square().sum().item()
    return math.inf if noise == 0 else 10 * math.log10(power / noise) if power else -math.inf
