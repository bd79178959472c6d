"""CacheSlots: where the tokens of a call are written in a cache, whose texts may have padding.

A column is one token of each text, as transformers counts them. A cache holds the tokens of each
text without padding, at the places 0, 1, ..., so that a text has the same places, and the same
results, whatever the lengths of the texts beside it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qfx.hf.kv_layer import KVLayer


class CacheSlots(NamedTuple):
    """`places`: int64 [B, T], -1 for padding. `kept`: bool [B, n + T], which columns the cache
    holds once they are written; None for all. `hidden`: bool [B, L], places that the call's mask
    hides although they are held, or None."""

    places: Tensor
    kept: Tensor | None
    hidden: Tensor | None

    def positions(self, given: Tensor | None, numbers: Tensor) -> Tensor:
        """The positions [.., B, T] of the tokens: those that a call gives, or the `numbers` [T] of
        their columns."""
        found = numbers[None] if given is None else given
        found = found.expand(*found.shape[:-2], *self.places.shape)
        if self.kept is None:
            return found
        return found.masked_fill(self.places < 0, 0)  # those of padding may be any number


def cache_slots(layer: KVLayer, numbers: Tensor, seen: Tensor | None, length: int) -> CacheSlots:
    """Finds the places of the T columns after those that `layer` has seen.

    `numbers`: the numbers of these columns, int64 [T].
    `seen`: bool [B, n + T], the call's mask, or None. `length`: L, the places of the cache."""
    texts, count, before = layer.texts, len(numbers), layer.kept
    shared = numbers.expand(texts, count)
    if before is None and (seen is None or bool(seen.all())):
        return CacheSlots(shared, None, None)
    first = layer.seen
    past = shared.new_ones(texts, first, dtype=torch.bool) if before is None else before
    new = past.new_ones(texts, count) if seen is None else seen[:, first:]
    kept = torch.cat([past, new], 1)
    places = torch.where(kept, kept.cumsum(1) - 1, -1)
    masked = None if seen is None else past & ~seen[:, :first]
    hidden = None
    if masked is not None and bool(masked.any()):
        hidden = past.new_zeros(texts, length)
        text, column = masked.nonzero(as_tuple=True)
        hidden[text, places[text, column]] = True
    return CacheSlots(places[:, first:], kept, hidden)
