"""kv_attention: attention of a few queries to a cache in int8 or int4. This module contains the
reference, the fake implementation and the gradient.

See docs/numerics.md (K3) to (K6).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qfx.ops.attention_decode import attention_decode
from qfx.ops.heads import added
from qfx.ops.kv_cache import INSTEAD, decoded, features_of, found_by, key_codes, value_codes
from qfx.ops.registry import fake, no_gradient, reference


@reference
def kv_attention(
    q: Tensor,
    keys: Tensor,
    key_scale: Tensor,
    values: Tensor,
    value_scale: Tensor,
    mask: Tensor | None,
    scale: float,
    length: int,
    out_dtype: torch.dtype,
    block_table: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Computes softmax(cap(q k^T scale) + mask) v for q [B, Hq, T, D] and the first `length` tokens
    of a cache, where Hq is a multiple of its H heads -> out_dtype [B, Hq, T, E]. The reference is
    exact, then rounded; operators are within the bound of (K6). Scales are those of (K1).

    cap(t) is softcap tanh(t / softcap), or t if `softcap` is 0. `mask` is bool or float32 and
    broadcasts to [B, Hq, T, length]: (A1). A row that sees no key is 0. Whole blocks of 64 tokens
    that no row sees are not read. With a block table the tensors of the cache must be contiguous.
    """
    keys, key_scale = (found_by(block_table, t) for t in (keys, key_scale))
    values, value_scale = (found_by(block_table, t) for t in (values, value_scale))
    group = q.shape[1] // max(keys.shape[1], 1)
    k = decoded(key_codes(keys, key_scale, length), key_scale, torch.float64)
    v = decoded(value_codes(values, value_scale, length), value_scale, torch.float64)
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    return _attended(q, k, v, mask, scale, softcap, out_dtype)


def _attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float,
    out_dtype: torch.dtype,
) -> Tensor:
    if not softcap:
        return attention_decode(q, k, v, mask, scale, False, out_dtype)
    b = added(mask, False, q.shape[2], k.shape[2], q.device)
    scores = q.double() @ k.double().mT * scale
    scores = (scores / softcap).tanh() * softcap + b
    scores = scores.masked_fill(b == -math.inf, -math.inf)
    top = scores.amax(-1, keepdim=True)
    p = (scores - top.masked_fill(top == -math.inf, 0)).exp()
    total = p.sum(-1, keepdim=True)
    return (p @ v.double() * (1 / total).masked_fill(total == 0, 0)).to(out_dtype)


@fake("kv_attention")
def _(
    q: Tensor,
    keys: Tensor,
    key_scale: Tensor,
    values: Tensor,
    value_scale: Tensor,
    mask: Tensor | None,
    scale: float,
    length: int,
    out_dtype: torch.dtype,
    block_table: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    return q.new_empty((*q.shape[:3], features_of(values, value_scale)), dtype=out_dtype)


no_gradient("kv_attention", INSTEAD)
