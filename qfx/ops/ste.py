"""linear_ste: a linear with straight-through gradients, for training its weight or what computes
its input. See docs/numerics.md (T1) (T2) (T3).

The forward is `linear` on codes that were computed before, so that linears with the same input
share them. `x`, `w`, `x_step` and `w_step` only determine where the gradients go; `factor` and the
code's rotation say how x and w were transformed before they became codes (R1). The backward needs
the packed weight, or the parameter w if it trains; the int8 codes of x with their scales if w or a
step needs a gradient; and x only if its step is given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qfx.ops.code import Code
from qfx.ops.int8_gradients import (
    gradient_product,
    int8_weight_gradient,
    turned_codes,
    turned_weight,
)
from qfx.ops.layout import Layout
from qfx.ops.linear import linear
from qfx.ops.quantize import code_range
from qfx.ops.registry import gradient, linear_fake, reference
from qfx.ops.rotation import transformed_weight
from qfx.ops.weight_values import weight_values

ops = torch.ops.qfx
_INPUTS = 12  # arguments of the operator


@reference
def linear_ste(
    x: Tensor,
    w: Tensor | None,
    bias: Tensor | None,
    x_step: Tensor | None,
    w_step: Tensor | None,
    codes: Sequence[Tensor],
    weight: Tensor,
    layout: Sequence[int],
    code: Sequence[int],
    seed: Tensor | None,
    out_dtype: torch.dtype,
    factor: Tensor | None = None,
) -> Tensor:
    """Computes linear(*codes, weight, layout, bias), [..., N]. `codes`: q int8 [..., K], its scale
    and its zero point.

    Gradients go to x [..., K], w [N, K] (None: the weight is frozen), bias [N], and to the steps
    (None for a dynamic scale). A weight that trains has one scale for each row. `seed` int64 [1]:
    the backward also runs in int8. The codes are of x' and w' of (R1), while x and w are
    untransformed. `code`: the five numbers of x, then the bits of w, and 1 if w has one scale for
    the matrix.
    """
    q, scale, zero_point = codes
    return linear(q, scale, zero_point, weight, layout, bias, "none", out_dtype)


linear_fake("linear_ste")


class SavedForBackward(NamedTuple):
    """The tensors saved for the backward."""

    x: Tensor | None = None  # only with x_step
    w: Tensor | None = None
    x_step: Tensor | None = None
    w_step: Tensor | None = None
    q: Tensor | None = None  # these three are for the gradients of w and of x_step
    scale: Tensor | None = None
    zero_point: Tensor | None = None
    weight: Tensor | None = None  # None if w is available and is quantized again
    seed: Tensor | None = None
    factor: Tensor | None = None


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, bias, x_step, w_step, codes, weight, layout, code, seed, _, factor = inputs
    ctx.layout, (*five, ctx.w_bits, ctx.w_per_tensor) = Layout(*layout), code
    ctx.code = Code(*five)
    if w is not None and not ctx.layout.one_scale:
        raise ValueError(
            f"linear_ste: w is given, but the weight has the layout {list(layout)}; a weight that "
            "trains has 8 bits, one scale for each row and no zero points"
        )
    ctx.keeps_turned = w is None
    again = w is not None and w_step is None
    q, scale, zero_point = codes if w is not None or x_step is not None else (None,) * 3
    saved = SavedForBackward(
        None if x_step is None else x,
        w,
        x_step,
        w_step,
        q,
        scale,
        zero_point,
        None if again else weight,
        seed,
        factor,
    )
    ctx.save_for_backward(*saved)
    ctx.set_materialize_grads(False)
    ctx.x_dtype, ctx.shape = x.dtype, x.shape
    ctx.wants = tuple([t is not None and t.requires_grad for t in inputs[:5]])
    ctx.bias_dtype = None if bias is None else bias.dtype


def _formula(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
    """Computes (T1): gradients of x, w, bias, x_step, w_step; None for the rest."""
    gradients: list[Tensor | None] = [None] * _INPUTS
    if grad is None:
        return tuple(gradients)
    saved = SavedForBackward(*ctx.saved_tensors)
    g = grad.reshape(math.prod(ctx.shape[:-1]), ctx.layout.n)
    want_x, want_w, want_bias, want_x_step, want_w_step = ctx.wants
    if want_x or want_x_step:
        gradients[0], gradients[3] = input_gradient(ctx, saved, g)
    if want_w or want_w_step:
        gradients[1], gradients[4] = weight_gradient(ctx, saved, g)
    if want_bias:
        gradients[2] = g.sum(0).to(ctx.bias_dtype)
    return tuple(d if want else None for d, want in zip(gradients, _padded(ctx.wants), strict=True))


def _padded(wants: tuple[bool, ...]) -> tuple[bool, ...]:
    return wants + (False,) * (_INPUTS - len(wants))


def input_gradient(ctx: Any, saved: SavedForBackward, g: Tensor) -> tuple[Tensor, Tensor | None]:
    if saved.seed is None:
        dx = g @ _weight(ctx, saved, g.dtype)
    else:
        is_dx = saved.x_step is None and not _is_transformed(ctx, saved)  # nothing follows
        dx = _int8_input_gradient(ctx, saved, g, ctx.x_dtype if is_dx else torch.float32)
    dx, dstep = dx.reshape(ctx.shape), None
    if saved.x_step is not None:
        q, zero_point = saved.q, saved.zero_point
        assert q is not None and zero_point is not None
        v, limits = _input(ctx, saved), code_range(ctx.code.bits, bool(ctx.code.symmetric))
        dx, dstep = through_step(dx, v, q.int() - zero_point, saved.x_step, zero_point, limits)
    if _is_transformed(ctx, saved):
        dx = ops.rotate(dx, saved.factor, ctx.code.rotation, True)
    return dx.to(ctx.x_dtype), dstep


def _int8_input_gradient(
    ctx: Any, saved: SavedForBackward, g: Tensor, dtype: torch.dtype
) -> Tensor:
    """Computes (T3). The transposed codes of a frozen weight that has its memory for itself, as
    those of experts have not, are kept on the CPU."""
    assert saved.seed is not None
    k = ctx.shape[-1]
    if saved.weight is None:
        parts = turned_codes(*_weight_codes(ctx, saved))
    elif ctx.keeps_turned and g.device.type == "cpu":
        return ops.frozen_gradient(g, saved.weight, list(ctx.layout), k, saved.seed, dtype)  # type: ignore
    else:
        parts = turned_weight(saved.weight, list(ctx.layout), k)
    return gradient_product(g, parts, k, saved.seed, dtype)


def weight_gradient(ctx: Any, saved: SavedForBackward, g: Tensor) -> tuple[Tensor, Tensor | None]:
    assert saved.w is not None and saved.q is not None
    assert saved.scale is not None and saved.zero_point is not None
    q = saved.q.reshape(g.shape[0], ctx.shape[-1])
    scale, zero_point = saved.scale.reshape(-1, 1), saved.zero_point.reshape(-1, 1)
    if saved.seed is None:
        dw = _product_like(
            saved.w, g.t(), ops.dequantize(q, scale, zero_point, None, None, "none", g.dtype)
        )
    else:
        dw = int8_weight_gradient(g, scale, q, zero_point, saved.seed + 1)
    dstep = None
    if saved.w_step is not None:
        codes, _ = _weight_codes(ctx, saved)
        w, limits = _float_weight(ctx, saved), code_range(ctx.w_bits, True)
        dw, dstep = through_step(dw, w, codes, saved.w_step, 0, limits)
    if _is_transformed(ctx, saved):
        dw = ops.rotate(dw, None, ctx.code.rotation, True)
        dw = dw if saved.factor is None else dw / saved.factor
    return dw.to(saved.w.dtype), dstep


def _is_transformed(ctx: Any, saved: SavedForBackward) -> bool:
    return saved.factor is not None or ctx.code.rotation != 0


def _input(ctx: Any, saved: SavedForBackward) -> Tensor:
    """Returns x' of (R1), in the dtype of x if it is x itself."""
    assert saved.x is not None
    if not _is_transformed(ctx, saved):
        return saved.x
    return ops.rotate(saved.x.float(), saved.factor, ctx.code.rotation)  # type: ignore[no-any-return]


def _float_weight(ctx: Any, saved: SavedForBackward) -> Tensor:
    """Returns w' of (R1)."""
    assert saved.w is not None
    return transformed_weight(saved.w, saved.factor, ctx.code.rotation)


def _product_like(w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Returns a @ b in the memory order of w, which may be the transpose of a parameter."""
    return (b.t() @ a.t()).t() if w.stride(0) < w.stride(1) else a @ b


def through_step(
    d: Tensor, v: Tensor, codes: Tensor, step: Tensor, zero: Any, limits: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Returns, for the gradient d of v^ = codes * step, the gradients of v and of step. (T2)"""
    scaled = v / step
    inside = (scaled + zero >= limits[0]) & (scaled + zero <= limits[1])
    d_step = d * (codes - torch.where(inside, scaled, 0.0))
    d_step = d_step.sum() if step.numel() == 1 else d_step.sum(-1)
    return d * inside, d_step.reshape(step.shape).to(step.dtype)


# --- the weight as the forward saw it: quantized again from the parameter, or its packed codes ---


def _weight(ctx: Any, saved: SavedForBackward, dtype: torch.dtype) -> Tensor:
    """Returns the dequantized weight w^ [N, K]. If the float weight is saved, it is quantized
    again, so that the codes of the forward need not stay in memory until the backward."""
    if saved.weight is not None:
        return weight_values(saved.weight, ctx.layout, ctx.shape[-1], dtype)
    axes = [0, 1] if ctx.w_per_tensor else [1]
    return ops.fake_quantize(_float_weight(ctx, saved), axes, ctx.w_bits, True, dtype)  # type: ignore[no-any-return]


def _weight_codes(ctx: Any, saved: SavedForBackward) -> tuple[Tensor, Tensor]:
    """Returns the codes [N, K] and the scale [N] of the weight."""
    if saved.weight is None:
        code = list(Code(ctx.w_bits, per_tensor=ctx.w_per_tensor))
        q, scale, _ = ops.quantize(_float_weight(ctx, saved), code)
    else:
        q, scale, *_ = ops.unpack_weight(saved.weight, list(ctx.layout), ctx.shape[-1])
    return q, scale.reshape(-1)


gradient("linear_ste", _setup, _formula)
