"""int8_linear_groups_ste: int8_linear_groups of a frozen weight, with straight-through gradients to
x and to the bias. docs/numerics.md (T1) (T2).

As int8_linear_ste, the codes were made outside. What is saved for the backward is the packed weight
with its scales, and the codes and x only when the step of x is given.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from qfx.ops.groups import int8_linear_groups
from qfx.ops.quantize import code_range
from qfx.ops.registry import gradient, linear_fake, reference
from qfx.ops.single_tensors import Quantized, dequantize
from qfx.ops.ste import through_step
from qfx.values.scheme import QSpec

ops = torch.ops.qfx
_INPUTS = 15  # of the operator


@reference
def int8_linear_groups_ste(
    x: Tensor,
    bias: Tensor | None,
    x_step: Tensor | None,
    q: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    packed: Tensor,
    w_scale: Tensor,
    w_zero: Tensor | None,
    w_group: int,
    bits: int,
    symmetric: bool,
    out_dtype: torch.dtype,
    factor: Tensor | None = None,
    rotation: int = 0,
) -> Tensor:
    """int8_linear_groups(q, scale, zero_point, packed, w_scale, w_zero, bias): [..., N]. (E3)

    Gradients go to x [..., K], bias [N] and x_step, None where the scales of x were chosen
    dynamically. The weight has a scale for each `w_group` elements of K, 0 for each row. The codes
    are of x' (R1), which `factor` [K] and `rotation` make of x; bits and symmetric are theirs.
    """
    weight = (packed, w_scale, w_zero)
    return int8_linear_groups(q, scale, zero_point, *weight, bias, "none", out_dtype)


linear_fake("int8_linear_groups_ste")


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, x_step, q, _, zero_point, packed, w_scale, w_zero, *how = inputs
    ctx.w_group, ctx.bits, ctx.symmetric, _, factor, ctx.rotation = how
    of_step = (None,) * 4 if x_step is None else (x, x_step, q, zero_point)
    ctx.save_for_backward(*of_step, packed, w_scale, w_zero, factor)
    ctx.set_materialize_grads(False)
    ctx.x_dtype, ctx.shape = x.dtype, x.shape
    ctx.wants = tuple(isinstance(t, Tensor) and t.requires_grad for t in inputs[:3])
    ctx.bias_dtype = None if bias is None else bias.dtype


def _formula(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
    """(T1): gradients of x, bias, x_step; None for the rest."""
    gradients: list[Tensor | None] = [None] * _INPUTS
    if grad is None:
        return tuple(gradients)
    *of_step, packed, w_scale, w_zero, factor = ctx.saved_tensors
    g = grad.reshape(math.prod(ctx.shape[:-1]), w_scale.shape[0])
    want_x, want_bias, want_step = ctx.wants
    if want_x or want_step:
        w = _weight(packed, w_scale, w_zero, ctx, g.dtype)
        dx, dstep = input_gradient(ctx, (g @ w).reshape(ctx.shape), of_step, factor)
        gradients[0], gradients[2] = dx if want_x else None, dstep if want_step else None
    if want_bias:
        gradients[1] = g.sum(0).to(ctx.bias_dtype)
    return tuple(gradients)


def _weight(
    packed: Tensor, scale: Tensor, zero: Tensor | None, ctx: Any, dtype: torch.dtype
) -> Tensor:
    """w^ [N, K]. (Q5)"""
    codes = ops.unpack_weight(packed, scale.shape[0], ctx.shape[-1])
    zero = torch.zeros_like(scale, dtype=torch.int32) if zero is None else zero
    return dequantize(Quantized(codes, scale, zero, QSpec(group=ctx.w_group)), dtype)


def input_gradient(
    ctx: Any, dx: Tensor, of_step: list[Tensor], factor: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    x, step, q, zero_point = of_step
    turned, dstep = factor is not None or ctx.rotation != 0, None
    if step is not None:
        x = ops.rotate(x.float(), factor, ctx.rotation) if turned else x
        limits = code_range(ctx.bits, ctx.symmetric)
        dx, dstep = through_step(dx, x, q.int() - zero_point, step, zero_point, limits)
    if turned:
        dx = ops.rotate(dx, factor, ctx.rotation, True)
    return dx.to(ctx.x_dtype), dstep


gradient("int8_linear_groups_ste", _setup, _formula)
