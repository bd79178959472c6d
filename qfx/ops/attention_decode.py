"""attention_decode computes float attention of one query or a few. attention_append first appends
the new keys and values to the earlier ones. This module contains their references, fake
implementations and gradients.

See docs/numerics.md (A7) to (A9).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qfx.ops.heads import added, batch_of, matched
from qfx.ops.registry import fake, no_gradient, reference


@reference
def attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """Computes attention in float: q [*B, M, D], k [*B, N, D], v [*B, N, E] -> out_dtype [*B, M,
    E]. The reference is exact, then rounded; operators are within the bound of (A9).

    Batch axes, mask and `causal` are as in int8_attention. A row that sees no key is 0.
    """
    q, k, v = matched(q, k, v)
    m, n = q.shape[-2], k.shape[-2]
    if n == 0:
        return q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=out_dtype)
    b = added(mask, causal, m, n, q.device)
    scores = (q.double() @ k.double().mT) * scale + b  # (A7)
    scores = scores.masked_fill(b == -math.inf, -math.inf)
    top = scores.amax(-1, keepdim=True)
    p = (scores - top.masked_fill(top == -math.inf, 0)).exp()  # (A8)
    total = p.sum(-1, keepdim=True)
    parts = (p[..., None] * v.double()[..., None, :, :]).masked_fill((b == -math.inf)[..., None], 0)
    return (parts.sum(-2) * (1 / total).masked_fill(total == 0, 0)).to(out_dtype)  # (A9)


@fake("attention_decode")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    return q.new_empty((*batch_of(q, k, v), q.shape[-2], v.shape[-1]), dtype=out_dtype)


@reference
def attention_append(
    q: Tensor,
    past_k: Tensor,
    k: Tensor,
    past_v: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Appends the keys k [*B, R, D] to past_k [*B, P, D] and the values v [*B, R, E] to past_v [*B,
    P, E], and computes attention_decode with all of them. Returns the result of attention_decode,
    the keys [*B, P + R, D] and the values [*B, P + R, E]."""
    keys, values = torch.cat([past_k, k], -2), torch.cat([past_v, v], -2)
    return attention_decode(q, keys, values, mask, scale, causal, out_dtype), keys, values


@fake("attention_append")
def _(
    q: Tensor,
    past_k: Tensor,
    k: Tensor,
    past_v: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    def grown(past: Tensor, added: Tensor) -> Tensor:
        rows = past.shape[-2] + added.shape[-2]
        return past.new_empty((*past.shape[:-2], rows, past.shape[-1]))

    y = q.new_empty((*batch_of(q, k, v), q.shape[-2], v.shape[-1]), dtype=out_dtype)
    return y, grown(past_k, k), grown(past_v, v)


no_gradient("attention_decode", "use scaled_dot_product_attention where gradients are needed")
no_gradient("attention_append", "use scaled_dot_product_attention where gradients are needed")
