"""kv_write_pages and kv_attention_pages: a KV cache in pages, which texts of any lengths take as
they grow. This module contains their references, fake implementations and gradients.

The tensors are those of `kv_empty`, whose first axis is pages instead of sequences: each page holds
the same number of tokens, a multiple of 16. See docs/numerics.md (K7).
"""

from __future__ import annotations

import torch
from torch import Tensor

from qfx.ops.kv_attention import kv_attention
from qfx.ops.kv_blocks import TOKENS, check_distinct
from qfx.ops.kv_cache import INSTEAD, features_of, kv_write
from qfx.ops.registry import fake, no_gradient, reference


@reference
def kv_write_pages(
    keys: Tensor,
    key_scale: Tensor,
    values: Tensor,
    value_scale: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
) -> None:
    """Writes the tokens k [N, H, D] and v [N, H, E] to `slots` of a cache in pages of L tokens:
    int64 [N], page * L + place. A token at slot -1 is not written. The codes are those of
    `kv_write`. (K7)

    If two tokens have the same slot, the later one stays. Raises an error, before anything is
    written, for a slot outside the cache, and if two tensors of the cache, or two elements of one,
    share memory. To autograd the written values are constants.
    """
    cache = (keys, key_scale, values, value_scale)
    for n, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, place = divmod(slot, key_scale.shape[2])
            token = (t[n : n + 1].unsqueeze(2) for t in (k, v))
            where = torch.tensor([place], dtype=torch.int64, device=k.device)
            kv_write(*(t[page : page + 1] for t in cache), *token, where)


@fake("kv_write_pages")
def _(
    keys: Tensor,
    key_scale: Tensor,
    values: Tensor,
    value_scale: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
) -> None:
    check_distinct("kv_write_pages", keys, key_scale, values, value_scale)


@reference
def kv_attention_pages(
    q: Tensor,
    keys: Tensor,
    key_scale: Tensor,
    values: Tensor,
    value_scale: Tensor,
    pages: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
    out_dtype: torch.dtype,
    softcap: float = 0.0,
) -> Tensor:
    """Computes causal attention of several texts to a cache in pages, q [N, Hq, D] -> out_dtype
    [N, Hq, E], where Hq is a multiple of the cache's H heads. (K7)

    Text s of S has the queries starts[s] .. starts[s + 1] - 1 (int32 [S + 1]), which are its last
    tokens, and lengths[s] keys (int32 [S]) in the pages that row s of `pages` names (int32 [S, M],
    of which more entries than it needs are not read). A query sees the keys up to its own, the last
    `window` of them, or all if `window` is 0. A query of no text is 0. `scale` and `softcap` are
    those of `kv_attention`, whose bits the result of each text has.

    Raises an error for a page outside the cache, for starts that decrease or exceed N, and for a
    text with fewer keys than queries or with more keys than its pages hold.
    """
    y = q.new_zeros((*q.shape[:2], features_of(values, value_scale)), dtype=out_dtype)
    edges = starts.tolist()
    for s, length in enumerate(lengths.tolist()):
        rows = slice(edges[s], edges[s + 1])
        count = rows.stop - rows.start
        cache = (joined(t, pages[s], length) for t in (keys, key_scale, values, value_scale))
        mask = visible(count, length, window)
        of_text = q[rows].transpose(0, 1)[None]
        given = (of_text, *cache, mask, scale, length, out_dtype, None, softcap)
        y[rows] = kv_attention(*given)[0].transpose(0, 1)
    return y


def joined(tensor: Tensor, pages: Tensor, length: int) -> Tensor:
    """Returns a tensor of a cache that holds the first `length` tokens of these pages as one
    sequence, and the rest of the last page."""
    tokens = tensor.shape[2] * (TOKENS if tensor.ndim == 5 else 1)
    used = pages[: -(-length // tokens)].long()
    return tensor[used].transpose(0, 1).flatten(1, 2)[None]


def visible(queries: int, length: int, window: int) -> Tensor:
    """Returns the mask bool [queries, length] of queries that are the last tokens."""
    own = torch.arange(length - queries, length, dtype=torch.int64, device="cpu")[:, None]
    behind = own - torch.arange(length, dtype=torch.int64, device="cpu")
    return (behind >= 0) & (behind < window if window else behind >= 0)


@fake("kv_attention_pages")
def _(
    q: Tensor,
    keys: Tensor,
    key_scale: Tensor,
    values: Tensor,
    value_scale: Tensor,
    pages: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
    out_dtype: torch.dtype,
    softcap: float = 0.0,
) -> Tensor:
    return q.new_empty((*q.shape[:2], features_of(values, value_scale)), dtype=out_dtype)


no_gradient("kv_attention_pages", INSTEAD)
