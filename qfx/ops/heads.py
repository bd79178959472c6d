"""Helpers of the attention operators: which heads of queries share the heads of keys and values,
and which keys a row sees."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

HIDDEN, BEHIND = -1e4, -1e3  # mask values, absolute and below the row's largest, of unseen keys


def batch_of(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Returns the batch axes of attention: the broadcast batch axes of q, k and v. k and v may have
    fewer heads (the last batch axis) than q; each of them then belongs to several consecutive heads
    of q."""
    if q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
        return tuple(q.shape[:-2])
    keys, values = (_heads(t.shape[:-2], _group(q, k, v)) for t in (k, v))
    return tuple(torch.broadcast_shapes(q.shape[:-2], keys, values))


def _group(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Returns the number of heads of q for each head of k and v."""
    if q.dim() < 3 or q.dim() != k.dim() or k.dim() != v.dim():
        return 1
    of_q, of_k = q.shape[-3], k.shape[-3]
    fewer = of_k == v.shape[-3] and 1 < of_k < of_q and of_q % of_k == 0
    return of_q // of_k if fewer else 1


def _heads(batch: Sequence[int], group: int) -> tuple[int, ...]:
    return (*batch[:-1], batch[-1] * group) if group > 1 else tuple(batch)


def matched(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v, each expanded to the batch axes of `batch_of`."""
    batch, group = batch_of(q, k, v), _group(q, k, v)
    if group > 1:
        k, v = (t.repeat_interleave(group, -3) for t in (k, v))
    q, k, v = (t.expand(*batch, *t.shape[-2:]) for t in (q, k, v))
    return q, k, v


def added(
    mask: Tensor | None, causal: bool, m: int, n: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Returns float32 [..., M, N] to add to the scores: the mask, with minus infinity for keys that
    a row does not see. (A1)"""
    none = torch.zeros(m, n, dtype=torch.float32, device=device)
    b = none if mask is None else mask
    if b.dtype == torch.bool:
        b = torch.zeros_like(b, dtype=torch.float32).masked_fill(~b, -math.inf)
    if causal:
        b = (b + none).masked_fill(~torch.ones_like(none, dtype=torch.bool).tril(), -math.inf)
    if n == 0:
        return b + none
    top = torch.where(b.isnan(), -math.inf, b).amax(-1, keepdim=True)
    hidden = (b <= HIDDEN) & (b - top <= BEHIND)
    return b.masked_fill(hidden, -math.inf) + none
