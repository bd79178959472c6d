"""int8_attention_backward: the gradients of int8_attention, in int8. This module contains the
reference, the fake implementation, and the gradient of int8_attention.

See docs/numerics.md (A11) to (A14).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qfx.ops.attention import codes_of_heads, weights
from qfx.ops.code import Code
from qfx.ops.heads import added, matched
from qfx.ops.quantize import quantize
from qfx.ops.registry import fake, gradient, no_gradient, reference

ops = torch.ops.qfx
ROWS = 64  # of queries whose products are one sum of integers
_SMALLEST_WEIGHT = 2.0**-126
_INPUTS = 7  # arguments of int8_attention


@reference
def int8_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of q [*B, M, D], k [*Bk, N, D] and v [*Bk, N, E] under the gradient
    grad [*B, M, E] of `int8_attention`, each in the dtype of its tensor.

    k and v have the same batch axes; along each, they have the size of q, or 1, or along the last
    one fewer heads than q, each of which belongs to several consecutive heads of q. `mask` and
    `causal` are as in int8_attention.
    """
    shapes, (q, k, v) = (q.shape, k.shape, v.shape), matched(q, k, v)
    dtypes = (q.dtype, k.dtype, v.dtype)
    if q.numel() == 0 or k.numel() == 0 or v.numel() == 0:
        return tuple(q.new_zeros(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True))  # type: ignore[return-value]
    w, inverse, ds = score_gradients(grad, q, k, v, mask, scale, causal)
    w_codes, w_scale, _ = quantize(w, Code())  # (A13)
    ds_codes, ds_scale, _ = quantize(ds, Code())
    of_scores = ds_scale * (inverse * scale)
    dv = _contracted(w_scale * inverse * grad.float(), w_codes)
    dk = _contracted(of_scores * q.float(), ds_codes)
    faulty = ~k.isfinite().all(-1, keepdim=True)  # counts as the mean: who sees it, knows
    k_codes, k_scale, _ = quantize((k.float() - _mean(k)).masked_fill(faulty, 0).mT, Code())
    dq = (ds_codes.double() @ k_codes.double().mT).float() * k_scale.mT * of_scores  # (A14)
    found = (dq, _of_shared(dk, shapes[1]), _of_shared(dv, shapes[2]))
    return tuple(t.to(d) for t, d in zip(found, dtypes, strict=True))  # type: ignore[return-value]


def score_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the weights [*B, M, N] of the keys, the inverses [*B, M, 1] of their sums, 0 where
    that is 0, and the gradients of the scores, before they are multiplied by the inverse and by
    `scale`. All operands have the same batch axes. (A11) (A12)"""
    b = added(mask, causal, q.shape[-2], k.shape[-2], q.device)
    g_codes, g_scale = codes_of_heads(grad)
    v_codes, v_scale = codes_of_heads(v.float() - _mean(v))
    w = weights(q, k, b, scale, causal, torch.ones_like(v_scale))
    total = w.sum(-1, keepdim=True)
    inverse = (1 / total).masked_fill(total == 0, 0)
    y = (g_codes.double() @ v_codes.double().mT).float() * (g_scale * v_scale.mT)
    counts = ~(w < _SMALLEST_WEIGHT)
    y = y - (w * y).masked_fill(~counts, 0).sum(-1, keepdim=True) * inverse
    return w, inverse, (w * y).masked_fill(~counts, 0)


def _mean(x: Tensor) -> Tensor:
    """Returns the mean over tokens, [*B, 1, D]; what is not finite counts as 0."""
    return x.float().nan_to_num(0, 0, 0).sum(-2, keepdim=True) / x.shape[-2]


def _contracted(x: Tensor, codes: Tensor) -> Tensor:
    """Returns codes [*B, M, N]^T x [*B, M, D], float32 [*B, N, D]: sums over the columns of x in
    int8, ROWS rows at a time."""
    total = x.new_zeros(*codes.shape[:-2], codes.shape[-1], x.shape[-1])
    for part, of_part in zip(x.split(ROWS, -2), codes.split(ROWS, -2), strict=True):
        q, scale, _ = quantize(part.mT, Code())
        total += (scale * (q.double() @ of_part.double()).float()).mT
    return total


def _of_shared(full: Tensor, shape: torch.Size) -> Tensor:
    """Sums the gradients of heads of queries that share one of keys."""
    if full.dim() > 2 and 1 < shape[-3] < full.shape[-3]:
        full = full.unflatten(-3, (shape[-3], -1)).sum(-3)
    return full.sum_to_size(shape)


@fake("int8_attention_backward")
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, mask, ctx.scale, ctx.causal, _ = inputs
    if mask is not None and mask.requires_grad:
        raise NotImplementedError(
            "qfx::int8_attention gives its mask no gradient; attention with a learned mask stays "
            "float"
        )
    ctx.save_for_backward(q, k, v, mask)


def _formula(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    q, k, v, mask = ctx.saved_tensors
    batch = torch.broadcast_shapes(k.shape[:-2], v.shape[:-2])
    operands = [
        q.expand(*grad.shape[:-2], *q.shape[-2:]),
        *(t.expand(*batch, *t.shape[-2:]) for t in (k, v)),
    ]
    found = ops.int8_attention_backward(grad, *operands, mask, ctx.scale, ctx.causal)
    sums = [each.sum_to_size(t.shape) for each, t in zip(found, (q, k, v), strict=True)]
    return (*sums, *[None] * (_INPUTS - 3))


gradient("int8_attention", _setup, _formula)
no_gradient("int8_attention_backward")
