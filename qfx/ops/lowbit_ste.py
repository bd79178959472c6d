"""lowbit_linear_ste: lowbit_linear with straight-through gradients to x and to the bias.
docs/numerics.md (T1) (T2)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from qfx.ops.groups_ste import input_gradient
from qfx.ops.lowbit import lowbit_linear
from qfx.ops.registry import gradient, linear_fake, reference

ops = torch.ops.qfx
_INPUTS = 15  # of the operator


@reference
def lowbit_linear_ste(
    x: Tensor,
    bias: Tensor | None,
    x_step: Tensor | None,
    q: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    packed: Tensor,
    n: int,
    w_bits: int,
    w_group: int,
    bits: int,
    symmetric: bool,
    out_dtype: torch.dtype,
    factor: Tensor | None = None,
    rotation: int = 0,
) -> Tensor:
    """lowbit_linear(q, scale, zero_point, packed, n, w_bits, w_group, bias): [..., N]. (E4)

    Gradients go to x [..., K], bias [N] and x_step, None where the scales of x were chosen
    dynamically. The codes are of x' (R1), which `factor` [K] and `rotation` make of x; bits and
    symmetric are theirs.
    """
    weight = (packed, n, w_bits, w_group)
    return lowbit_linear(q, scale, zero_point, *weight, bias, "none", out_dtype)


linear_fake("lowbit_linear_ste")


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, x_step, q, _, zero_point, packed, ctx.n, _, ctx.w_group, *how = inputs
    ctx.bits, ctx.symmetric, _, factor, ctx.rotation = how
    of_step = (None,) * 4 if x_step is None else (x, x_step, q, zero_point)
    ctx.save_for_backward(*of_step, packed, factor)
    ctx.set_materialize_grads(False)
    ctx.x_dtype, ctx.shape = x.dtype, x.shape
    ctx.wants = tuple(isinstance(t, Tensor) and t.requires_grad for t in inputs[:3])
    ctx.bias_dtype = None if bias is None else bias.dtype


def _formula(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
    """(T1): gradients of x, bias, x_step; None for the rest."""
    gradients: list[Tensor | None] = [None] * _INPUTS
    if grad is None:
        return tuple(gradients)
    *of_step, packed, factor = ctx.saved_tensors
    g = grad.reshape(math.prod(ctx.shape[:-1]), ctx.n)
    want_x, want_bias, want_step = ctx.wants
    if want_x or want_step:
        w = lowbit_values(packed, ctx.n, ctx.shape[-1], ctx.w_group, g.dtype)
        dx, dstep = input_gradient(ctx, (g @ w).reshape(ctx.shape), of_step, factor)
        gradients[0], gradients[2] = dx if want_x else None, dstep if want_step else None
    if want_bias:
        gradients[1] = g.sum(0).to(ctx.bias_dtype)
    return tuple(gradients)


def lowbit_values(packed: Tensor, n: int, k: int, group: int, dtype: torch.dtype) -> Tensor:
    """w^ [N, K]. (Q14)"""
    codes, scale, zero, minimum = ops.unpack_lowbit(packed, n, k, group)

    def each(of_groups: Tensor) -> Tensor:
        return of_groups.repeat_interleave(group, 1)[:, :k]

    return ((codes - each(zero)) * each(scale) + each(minimum)).to(dtype)


gradient("lowbit_linear_ste", _setup, _formula)
