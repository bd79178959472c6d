"""CacheSlots: the places in a cache at which the tokens of a call are written. Padding has no
place.

A column is one token of each sequence, as transformers counts them. A cache stores the tokens of
each sequence without padding, at places 0, 1, ..., so the places and results of a sequence do not
depend on the lengths of the other sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qfx.hf.kv_layer import KVLayer


class CacheSlots(NamedTuple):
    """The places of the T tokens of a call, which follow n earlier columns.

    `places`: int64 [B, T], -1 for padding. `kept`: bool [B, n + T], True for columns whose token is
    stored in the cache; None if all are. `hidden`: bool [B, L], True for places whose token is
    stored but hidden by the mask of the call; None if there are no such places.
    """

    places: Tensor
    kept: Tensor | None
    hidden: Tensor | None

    def positions(self, given: Tensor | None, numbers: Tensor) -> Tensor:
        """Returns the positions [.., B, T] of the tokens: those passed to the call, or the
        `numbers` [T] of their columns."""
        found = numbers[None] if given is None else given
        found = found.expand(*found.shape[:-2], *self.places.shape)
        if self.kept is None:
            return found
        return found.masked_fill(self.places < 0, 0)  # the positions of padding are arbitrary


def cache_slots(layer: KVLayer, numbers: Tensor, seen: Tensor | None, length: int) -> CacheSlots:
    """Returns the places of the next T columns, after the n columns that `layer` holds.

    `numbers`: the numbers of these columns, int64 [T]. `seen`: bool [B, n + T], the mask of the
    call, or None. `length`: L, the number of places of the cache.
    """
    batch, count, before = layer.batch, len(numbers), layer.kept
    shared = numbers.expand(batch, count)
    if before is None and (seen is None or bool(seen.all())):
        return CacheSlots(shared, None, None)
    first = layer.seen
    past = shared.new_ones(batch, first, dtype=torch.bool) if before is None else before
    new = past.new_ones(batch, count) if seen is None else seen[:, first:]
    kept = torch.cat([past, new], 1)
    places = torch.where(kept, kept.cumsum(1) - 1, -1)
    masked = None if seen is None else past & ~seen[:, :first]
    hidden = None
    if masked is not None and bool(masked.any()):
        hidden = past.new_zeros(batch, length)
        text, column = masked.nonzero(as_tuple=True)
        hidden[text, places[text, column]] = True
    return CacheSlots(places[:, first:], kept, hidden)
