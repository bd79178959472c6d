"""int8_mm, int8_linear, int8_linear_dynamic: reference, fake, gradient. docs/numerics.md."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qfx.ops.quantize import dequantize, quantize, quantize_static
from qfx.ops.registry import fake, linear_fake, no_gradient, reference
from qfx.ops.weight import unpack_weight


@reference
def int8_mm(q: Tensor, zero_point: Tensor, packed: Tensor, n: int) -> Tensor:
    """sum_k (q[m, k] - zero_point[m]) * w[n, k], exact: q int8 [..., K] -> int32 [..., n]. (G1)"""
    w = unpack_weight(packed, n, q.shape[-1]).long()
    rows = q.reshape(q.shape[:-1].numel(), q.shape[-1]).long() - zero_point.reshape(-1, 1)
    return (rows @ w.t()).int().reshape(*q.shape[:-1], n)


@fake("int8_mm")
def _(q: Tensor, zero_point: Tensor, packed: Tensor, n: int) -> Tensor:
    return q.new_empty((*q.shape[:-1], n), dtype=torch.int32)


@reference
def int8_linear(
    q: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    packed: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """dequantize(int8_mm(q)): q int8 [..., K], w_scale float32 [N] -> out_dtype [..., N]. (E1)"""
    acc = int8_mm(q, zero_point, packed, w_scale.numel())
    return dequantize(acc, scale, None, w_scale, bias, activation, out_dtype)


linear_fake("int8_linear")


@reference
def int8_linear_dynamic(
    x: Tensor,
    packed: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    axes: Sequence[int],
    bits: int,
    symmetric: bool,
    activation: str,
    out_dtype: torch.dtype,
    factor: Tensor | None = None,
    rotation: int = 0,
) -> Tensor:
    """int8_linear(quantize(x)): x [..., K] float, w_scale float32 [N] -> out_dtype [..., N].

    The weight was packed for x transformed by factor and rotation (R1).
    """
    codes = quantize(x, axes, bits, symmetric, factor, rotation)
    return int8_linear(*codes, packed, w_scale, bias, activation, out_dtype)


linear_fake("int8_linear_dynamic")


@reference
def int8_linear_requantize(
    q: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    packed: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    activation: str,
    out_scale: Tensor,
    out_zero_point: Tensor | None,
    bits: int,
    symmetric: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """quantize_static(int8_linear(q)): codes for a following int8 linear. (E1), (Q6)"""
    y = int8_linear(q, scale, zero_point, packed, w_scale, bias, activation, torch.float32)
    return quantize_static(y, out_scale, out_zero_point, bits, symmetric)


@fake("int8_linear_requantize")
def _(
    q: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    packed: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    activation: str,
    out_scale: Tensor,
    out_zero_point: Tensor | None,
    bits: int,
    symmetric: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    row = (*q.shape[:-1], 1)
    return (
        q.new_empty((*q.shape[:-1], w_scale.shape[0])),
        scale.new_empty(row),
        zero_point.new_empty(row),
    )


no_gradient("int8_linear")
no_gradient("int8_linear_requantize")
no_gradient("int8_linear_dynamic")
