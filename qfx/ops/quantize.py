"""quantize, dequantize, fake_quantize: their references, fake implementations and gradients. See
docs/numerics.md."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from qfx.graph.activations import activate
from qfx.ops.code import Code
from qfx.ops.philox import random_bits
from qfx.ops.registry import fake, no_gradient, reference
from qfx.ops.rotation import rotate
from qfx.values.scheme import PER_TENSOR

SMALLEST_SCALE = 2.0**-126  # the smallest normal float32


def code_range(bits: int, symmetric: bool) -> tuple[int, int]:
    """Returns (qmin, qmax) of `bits`-bit codes; symmetric codes leave out the lowest one."""
    qmax = 2 ** (bits - 1) - 1
    return (-qmax if symmetric else -qmax - 1), qmax


Triple = tuple[Tensor, Tensor, Tensor]


@reference
def quantize(
    x: Tensor,
    code: Sequence[int],
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    seed: Tensor | None = None,
    factor: Tensor | None = None,
) -> Triple:
    """Quantizes x [..., K] to codes q int8 [..., K], scale float32 and zero_point int32 [..., 1],
    or [..., G] with groups. `code`: the five numbers of a `Code`. (Q1)-(Q4)

    First x is replaced by rotate(x.float(), factor, rotation) (R1), which is x without a factor and
    a rotation. Per tensor, all rows have the same scale and zero point, except those with a NaN or
    an infinity. With groups of K each group is treated like a row, G = ceil(K / group), and the
    last group may be shorter. A given `scale` float32, optionally with a zero point int32, is one
    for all or one for each row (Q6). `seed` int64 [1]: symmetric codes, rounded stochastically
    (Q7). The codes depend on nothing but the values of the arguments.
    """
    how = Code(*code)
    x = rotate(x.float(), factor, how.rotation)
    if seed is not None:
        return _stochastic(x, how, seed)
    if scale is not None:
        return _static(x, how, scale, zero_point)
    return _in_groups(x, how) if how.group else _dynamic(x, how)


def _dynamic(x: Tensor, how: Code) -> Triple:
    """Quantizes with scales that are computed from x. (Q1)-(Q4)"""
    qmin, qmax = code_range(how.bits, bool(how.symmetric))
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    padded = F.pad(rows, (0, 1))  # the range contains zero, also that of an empty row
    low, high = padded.amin(1, keepdim=True), padded.amax(1, keepdim=True)
    largest = torch.maximum(high, -low)
    finite = largest.isfinite()
    if how.per_tensor:  # over the finite rows, of which there may be none
        low = F.pad(low.where(finite, 0), (0, 0, 0, 1)).amin().expand_as(low)
        high = F.pad(high.where(finite, 0), (0, 0, 0, 1)).amax().expand_as(high)
    if how.symmetric:
        scale = torch.maximum(high, -low) / qmax  # (Q1)
    else:
        scale = high / (qmax - qmin) - low / (qmax - qmin)  # (Q2)
    scale = scale.clamp_min(SMALLEST_SCALE)
    inverse = 1 / scale
    zero_point = torch.zeros_like(scale)
    if not how.symmetric:
        zero_point = (qmin - (low * inverse).round()).clamp(qmin, qmax)
    q = ((rows * inverse).round() + zero_point).clamp(qmin, qmax)  # (Q3)
    q, zero_point = torch.where(finite, q, 0), torch.where(finite, zero_point, 0)  # (Q4)
    scale = torch.where(finite, scale, largest)
    shape = (*x.shape[:-1], 1)
    return q.to(torch.int8).reshape(x.shape), scale.reshape(shape), zero_point.int().reshape(shape)


def _in_groups(x: Tensor, how: Code) -> Triple:
    """Quantizes each group of K like a row, with a scale and a zero point of its own."""
    k, rows = x.shape[-1], x.shape[:-1].numel()
    groups = -(-k // how.group)
    padded = F.pad(x.reshape(rows, k), (0, groups * how.group - k))
    alone = how._replace(per_tensor=0, group=0)
    q, scale, zero_point = _dynamic(padded.reshape(rows * groups, how.group), alone)
    q = q.reshape(rows, groups * how.group)[:, :k]
    shape = (*x.shape[:-1], groups)
    return q.reshape(x.shape), scale.reshape(shape), zero_point.reshape(shape)


def _static(x: Tensor, how: Code, scale: Tensor, zero_point: Tensor | None) -> Triple:
    """Quantizes with a given scale. (Q6)"""
    qmin, qmax = code_range(how.bits, bool(how.symmetric))
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


def _stochastic(x: Tensor, how: Code, seed: Tensor) -> Triple:
    """Quantizes with the scales of symmetric codes and stochastic rounding. (Q7)"""
    qmax = code_range(how.bits, True)[1]
    _, scale, zero_point = _dynamic(x, how)
    u = (random_bits(seed, x.numel()).float() * 2**-16 + 2**-17).reshape(x.shape)
    q = (x * (1 / scale) + u).floor().clamp(-qmax, qmax)
    return torch.where(scale.isfinite(), q, 0).to(torch.int8), scale, zero_point


@fake("quantize")
def _(
    x: Tensor,
    code: Sequence[int],
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    seed: Tensor | None = None,
    factor: Tensor | None = None,
) -> Triple:
    group = Code(*code).group if seed is None and scale is None else 0
    shape = (*x.shape[:-1], -(-x.shape[-1] // group) if group else 1)
    row_scale = x.new_empty(shape, dtype=torch.float32)
    return x.new_empty(x.shape, dtype=torch.int8), row_scale, x.new_empty(shape, dtype=torch.int32)


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
    """Computes act((q - zero_point) * (scale * col_scale) + bias) from q int8 or int32 [..., N].
    (Q5) (E1)

    col_scale is float32 [N], or [*B, 1, N] for q [*B, M, N]: one for each column of each matrix.
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
def fake_quantize(
    x: Tensor, axes: Sequence[int], bits: int, symmetric: bool, out_dtype: torch.dtype
) -> Tensor:
    """Returns x^ = dequantize(quantize(x)), the values that the codes of x represent. (Q5)"""
    code = Code(bits, int(symmetric), int(tuple(axes) == PER_TENSOR))
    return dequantize(*quantize(x, code), None, None, "none", out_dtype)


@fake("fake_quantize")
def _(x: Tensor, axes: Sequence[int], bits: int, symmetric: bool, out_dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=out_dtype)


no_gradient("quantize")
no_gradient("fake_quantize")
no_gradient("dequantize")
