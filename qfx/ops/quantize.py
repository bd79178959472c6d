"""quantize and dequantize: reference, fake, gradient. Equations: docs/numerics.md."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from qfx.ops.activations import activate
from qfx.ops.registry import fake, no_gradient, reference
from qfx.ops.rotation import rotate
from qfx.values.scheme import PER_TENSOR

SMALLEST_SCALE = 2.0**-126  # the smallest normal float32


def code_range(bits: int, symmetric: bool) -> tuple[int, int]:
    """(qmin, qmax) of `bits`-bit codes; symmetric codes leave out the lowest one."""
    qmax = 2 ** (bits - 1) - 1
    return (-qmax if symmetric else -qmax - 1), qmax


@reference
def quantize(
    x: Tensor,
    axes: Sequence[int],
    bits: int,
    symmetric: bool,
    factor: Tensor | None = None,
    rotation: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., K] -> codes q int8 [..., K], scale float32 and zero_point int32 [..., 1]. (Q1)-(Q4)

    Of rotate(x.float(), factor, rotation) (R1), without a factor and a rotation x itself. Per
    tensor all rows have the same scale and zero point, but for those with a NaN or an infinity.
    """
    x = rotate(x.float(), factor, rotation)
    qmin, qmax = code_range(bits, symmetric)
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    padded = F.pad(rows, (0, 1))  # the range holds zero, also that of an empty row
    low, high = padded.amin(1, keepdim=True), padded.amax(1, keepdim=True)
    largest = torch.maximum(high, -low)
    finite = largest.isfinite()
    if tuple(axes) == PER_TENSOR:  # of the finite rows, none of which may be there
        low = F.pad(low.where(finite, 0), (0, 0, 0, 1)).amin().expand_as(low)
        high = F.pad(high.where(finite, 0), (0, 0, 0, 1)).amax().expand_as(high)
    if symmetric:
        scale = torch.maximum(high, -low) / qmax  # (Q1)
    else:
        scale = high / (qmax - qmin) - low / (qmax - qmin)  # (Q2)
    scale = scale.clamp_min(SMALLEST_SCALE)
    inverse = 1 / scale
    zero_point = torch.zeros_like(scale)
    if not symmetric:
        zero_point = (qmin - (low * inverse).round()).clamp(qmin, qmax)
    q = ((rows * inverse).round() + zero_point).clamp(qmin, qmax)  # (Q3)
    q, zero_point = torch.where(finite, q, 0), torch.where(finite, zero_point, 0)  # (Q4)
    scale = torch.where(finite, scale, largest)
    shape = (*x.shape[:-1], 1)
    return q.to(torch.int8).reshape(x.shape), scale.reshape(shape), zero_point.int().reshape(shape)


@fake("quantize")
def _(
    x: Tensor,
    axes: Sequence[int],
    bits: int,
    symmetric: bool,
    factor: Tensor | None = None,
    rotation: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (*x.shape[:-1], 1)
    scale = x.new_empty(shape, dtype=torch.float32)
    return x.new_empty(x.shape, dtype=torch.int8), scale, x.new_empty(shape, dtype=torch.int32)


@reference
def dequantize(
    q: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    col_scale: Tensor | None,
    bias: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """q int8 or int32 [..., N] -> act((q - zero_point) * (scale * col_scale) + bias). (Q5) (E1)

    col_scale float32 [N], or [*B, 1, N] for q [*B, M, N]: one for each column of each matrix.
    """
    rows = q.reshape(q.shape[:-1].numel(), q.shape[-1])
    if zero_point is not None:
        rows = rows - zero_point.reshape(-1, 1)  # int32
    factor = scale.reshape(-1, 1)
    if col_scale is not None:
        factor = factor * col_scale.expand(q.shape).reshape(rows.shape)
    y = rows.float() * factor
    if bias is not None:
        y = y + bias.float()
    return activate(activation, y).to(out_dtype).reshape(q.shape)


@fake("dequantize")
def _(
    q: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    col_scale: Tensor | None,
    bias: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
) -> Tensor:
    return q.new_empty(q.shape, dtype=out_dtype)


@reference
def quantize_static(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bits: int,
    symmetric: bool,
    factor: Tensor | None = None,
    rotation: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """As quantize with a given scale float32 and zero point int32, one or one per row. (Q6)"""
    x = rotate(x.float(), factor, rotation)
    qmin, qmax = code_range(bits, symmetric)
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    given = scale.reshape(-1, 1).expand(rows.shape[0], 1)
    used = given.clamp_min(SMALLEST_SCALE)
    zero = torch.zeros_like(used) if zero_point is None else zero_point.reshape(-1, 1)
    zero = zero.expand(rows.shape[0], 1).clamp(qmin, qmax)
    q = ((rows * (1 / used)).clamp(-1024, 1024).round() + zero).clamp(qmin, qmax)
    largest = F.pad(rows, (0, 1)).abs().amax(1, keepdim=True)
    finite = largest.isfinite() & given.isfinite()
    q, zero = torch.where(finite, q, 0), torch.where(finite, zero, 0)
    used = torch.where(largest.isfinite(), torch.where(given.isfinite(), used, given), largest)
    shape = (*x.shape[:-1], 1)
    return q.to(torch.int8).reshape(x.shape), used.reshape(shape), zero.int().reshape(shape)


@fake("quantize_static")
def _(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    bits: int,
    symmetric: bool,
    factor: Tensor | None = None,
    rotation: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (*x.shape[:-1], 1)
    row_scale = x.new_empty(shape, dtype=torch.float32)
    return x.new_empty(x.shape, dtype=torch.int8), row_scale, x.new_empty(shape, dtype=torch.int32)


@reference
def fake_quantize(
    x: Tensor, axes: Sequence[int], bits: int, symmetric: bool, out_dtype: torch.dtype
) -> Tensor:
    """x^ = dequantize(quantize(x)), the values that the codes of x stand for. (Q5)"""
    return dequantize(*quantize(x, axes, bits, symmetric), None, None, "none", out_dtype)


@fake("fake_quantize")
def _(x: Tensor, axes: Sequence[int], bits: int, symmetric: bool, out_dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=out_dtype)


no_gradient("quantize")
no_gradient("quantize_static")
no_gradient("fake_quantize")
no_gradient("dequantize")
