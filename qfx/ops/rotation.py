"""rotate, the transform of K that precedes quantization (R1): its reference, fake implementation
and gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qfx.ops.registry import fake, gradient, reference

ops = torch.ops.qfx


def _stage(v: Tensor, h: int, back: bool) -> Tensor:
    """Computes one stage of R, or of its transpose if `back`: adds to every element of v [...,
    block] its partner at distance h, or subtracts the partner. Equation (R1)."""
    i = torch.arange(v.shape[-1], dtype=torch.int64, device=v.device)
    at = i ^ h if back else i
    low_bit_of_a_digit = bool(h & 0b01010101)
    minus = ((at & h) != 0) ^ ((at & 2 * h) != 0) if low_bit_of_a_digit else (at & h) != 0
    partner = v[..., i ^ h]
    return v + torch.where(minus, -partner, partner)


def rotated_blocks(v: Tensor, block: int, back: bool) -> Tensor:
    """Multiplies every `block` consecutive elements of K by R, or by the transpose of R if
    `back`."""
    blocks = v.reshape(*v.shape[:-1], v.shape[-1] // block, block)
    stages = [2**i for i in range(block.bit_length() - 1)]
    for h in reversed(stages) if back else stages:
        blocks = _stage(blocks, h, back)
    return (blocks * block**-0.5).reshape(v.shape)


def rotated(v: Tensor, rotation: int, back: bool) -> Tensor:
    """Multiplies v [..., K] by R, or by its transpose if `back`: blocks of `rotation` as long as
    they fit, then a block for each power of two in the rest of K, the largest first. (R1)"""
    k, begin, block, parts = v.shape[-1], 0, rotation, []
    while block:
        end = k & -block
        parts.append(rotated_blocks(v[..., begin:end], block, back))
        begin, block = end, block // 2
    return torch.cat(parts, -1)


@reference
def rotate(x: Tensor, factor: Tensor | None, rotation: int, back: bool = False) -> Tensor:
    """Computes R (x * factor): x float [..., K], factor float32 [K] or None for 1, R in blocks of
    `rotation` and, for the rest of K, in smaller ones. (R1)

    `rotation` is 0 (no R), 16 or 64. `back`: computes factor * (R^T x), the gradient.
    The result has the dtype of x. Source: docs/numerics.md.
    """
    v = x.float()
    if factor is not None and not back:
        v = v * factor
    if rotation:
        v = rotated(v, rotation, back)
    if factor is not None and back:
        v = v * factor
    return v.to(x.dtype)


@fake("rotate")
def _(x: Tensor, factor: Tensor | None, rotation: int, back: bool = False) -> Tensor:
    return x.new_empty(x.shape)


def transformed_weight(w: Tensor, factor: Tensor | None, rotation: int) -> Tensor:
    """Returns w' = R (w / factor) for w [N, K], in float32: what is quantized and packed. (R1)"""
    if factor is None and not rotation:
        return w
    v = w.float() if factor is None else w.float() / factor
    return ops.rotate(v, None, rotation)  # type: ignore[no-any-return]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, factor, ctx.rotation, ctx.back = inputs
    ctx.for_factor = factor is not None and factor.requires_grad
    ctx.save_for_backward(x if ctx.for_factor else None, factor)


def _formula(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Returns the gradients: for x the transpose of the linear map, for the factor a sum over
    rows."""
    x, factor = ctx.saved_tensors
    dx = ops.rotate(grad, factor, ctx.rotation, not ctx.back)
    if not ctx.for_factor:
        return dx, None, None, None
    rotated = ops.rotate(x if ctx.back else grad, None, ctx.rotation, True)
    products = rotated.float() * (grad if ctx.back else x).float()
    return dx, products.reshape(-1, products.shape[-1]).sum(0), None, None


gradient("rotate", _setup, _formula)
