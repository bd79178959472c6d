"""Convolutions with packed weights: im2col, im2col_backward, conv_dynamic. This module contains
their references, fake implementations and gradients. See docs/numerics.md (C1) (C2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qfx.graph.activations import activate
from qfx.ops.linear import linear_dynamic
from qfx.ops.registry import fake, gradient, in_python, no_gradient, reference

ops = torch.ops.qfx
Sizes = Sequence[int]


def outputs_of(sizes: Sizes, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes) -> Any:
    """Returns the number of windows along each axis of an image. `padding`: the zeros before and
    after each axis, two numbers for each."""
    around = [padding[2 * i] + padding[2 * i + 1] for i in range(len(kernel))]
    each = zip(sizes, around, kernel, stride, dilation, strict=True)
    return tuple(torch.sym_max((n + p - d * (k - 1) - 1) // s + 1, 0) for n, p, k, s, d in each)


@reference
def im2col(x: Tensor, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes) -> Tensor:
    """Returns the windows of a convolution as rows: x [B, C, *sizes] float -> [B, *outputs, taps *
    C]. (C1)

    There are 1 to 3 axes. The elements of a row are ordered by tap, the last axis fastest, then by
    channel. `padding`: the zeros before and after each axis, two numbers for each axis.
    """
    around = [n for i in reversed(range(len(kernel))) for n in padding[2 * i : 2 * i + 2]]
    windows = F.pad(x, around)
    for axis, (size, step, gap) in enumerate(zip(kernel, stride, dilation, strict=True)):
        reach = gap * (size - 1) + 1
        if windows.shape[2 + axis] < reach:
            shape = outputs_of(x.shape[2:], kernel, stride, padding, dilation)
            return x.new_zeros((x.shape[0], *shape, _taps(kernel) * x.shape[1]))
        windows = windows.unfold(2 + axis, reach, step)[..., ::gap]
    axes = len(kernel)
    order = (0, *range(2, 2 + axes), *range(2 + axes, 2 + 2 * axes), 1)
    return windows.permute(order).flatten(1 + axes).contiguous()


def _taps(kernel: Sizes) -> int:
    return int(torch.Size(kernel).numel())


@fake("im2col")
def _(x: Tensor, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes) -> Tensor:
    outputs = outputs_of(x.shape[2:], kernel, stride, padding, dilation)
    return x.new_empty((x.shape[0], *outputs, _taps(kernel) * x.shape[1]))


@in_python(
    "(Tensor grad, SymInt[] sizes, int[] kernel, int[] stride, int[] padding, int[] dilation) -> "
    "Tensor"
)
def im2col_backward(
    grad: Tensor, sizes: Sizes, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes
) -> Tensor:
    """Adds the gradients of windows to the elements that they were copied from: [B, *outputs, taps
    * C] -> `sizes` [B, C, *sizes]. The sum is computed in the dtype of grad, one tap after the
    other. (C1)"""
    axes = len(kernel)
    outputs = grad.shape[1 : 1 + axes]
    around = [n + padding[2 * i] + padding[2 * i + 1] for i, n in enumerate(sizes[2:])]
    dx = grad.new_zeros((sizes[0], *around, sizes[1]))
    taps = grad.unflatten(-1, (_taps(kernel), sizes[1]))
    for tap in range(_taps(kernel) if grad.numel() else 0):
        place = _place(tap, kernel)
        cut = [
            slice(at * gap, at * gap + step * (count - 1) + 1, step)
            for at, gap, step, count in zip(place, dilation, stride, outputs, strict=True)
        ]
        index = (slice(None), *cut)
        dx[index] += taps[..., tap, :]
    inside = [slice(padding[2 * i], padding[2 * i] + n) for i, n in enumerate(sizes[2:])]
    index = (slice(None), *inside)
    kept = dx[index].movedim(-1, 1)
    return kept.clone(memory_format=torch.contiguous_format)


def _place(tap: int, kernel: Sizes) -> list[int]:
    """Returns the place of a tap along each axis."""
    place = []
    for size in reversed(kernel):
        place.append(tap % size)
        tap //= size
    return place[::-1]


@fake("im2col_backward")
def _(
    grad: Tensor, sizes: Sizes, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes
) -> Tensor:
    return grad.new_empty(tuple(sizes))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *ctx.how = inputs
    ctx.sizes = x.shape


def _formula(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return ops.im2col_backward(grad, ctx.sizes, *ctx.how), None, None, None, None


gradient("im2col", _setup, _formula)


@reference
def conv_dynamic(
    x: Tensor,
    weight: Tensor,
    layout: Sequence[int],
    bias: Tensor | None,
    kernel: Sizes,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    code: Sequence[int],
    activation: str,
    out_dtype: torch.dtype,
    factor: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Computes linear_dynamic(im2col(x), weight): x [B, C, *sizes] float -> out_dtype [B, *outputs,
    N]. (C2)

    `residual` [B, *outputs, N] in out_dtype is added before the activation function. (E5)

    `weight` is packed from [N, taps * C], with taps and channels in the order of im2col. If it is a
    stack [G, bytes], group g of the channels meets the weight g, which gives the outputs from g * N
    / G on; the bias has all N elements. `padding`: the zeros before and after each axis.
    """
    groups = list(weight) if weight.dim() == 2 else [weight]
    windows = (im2col(part, kernel, stride, padding, dilation) for part in x.chunk(len(groups), 1))
    biases = [None] * len(groups) if bias is None else bias.chunk(len(groups))
    y = torch.cat([
        linear_dynamic(rows, w, layout, b, code, "none", torch.float32, factor)
        for rows, w, b in zip(windows, groups, biases, strict=True)
    ], -1)  # fmt: skip
    y = y if residual is None else y + residual.float()
    return activate(activation, y).to(out_dtype)


@fake("conv_dynamic")
def _(
    x: Tensor,
    weight: Tensor,
    layout: Sequence[int],
    bias: Tensor | None,
    kernel: Sizes,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    code: Sequence[int],
    activation: str,
    out_dtype: torch.dtype,
    factor: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    outputs = outputs_of(x.shape[2:], kernel, stride, padding, dilation)
    n = layout[0] * (weight.shape[0] if weight.dim() == 2 else 1)
    return x.new_empty((x.shape[0], *outputs, n), dtype=out_dtype)


for _name in ("conv_dynamic", "im2col_backward"):
    no_gradient(_name)
