"""Masks of attention: the slots of a cache that each query of a step sees, as the models take
them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from qfx.generate.layout import CacheLayout, LayerKind
from qfx.ops.kv_blocks import TOKENS


class Places:
    """Looks up slots, block tables and masks for places of tokens (their numbers in the sequence).
    The results are mostly views of larger tables, because computing such small tensors at each step
    would take as long as a layer."""

    def __init__(self, layout: CacheLayout) -> None:
        self._numbers = torch.arange(layout.length, dtype=torch.int64, device="cpu")
        self._slots = {size: _Slots(size, layout.length) for size in layout.slots}
        self._tables: dict[tuple[int, int], Tensor] = {}
        self._visible = [(kind.slots, _visible(kind)) for kind in layout.kinds.values()]

    def numbers(self, first: int, count: int) -> Tensor:
        """Returns first, first + 1, ...: int64 [T], which must not be written to."""
        return self._numbers[first : first + count]

    def table(self, batch: int, slots: int) -> Tensor:
        """Returns a block table in which each sequence has its own blocks; it must not be written
        to."""
        if (batch, slots) not in self._tables:
            self._tables[batch, slots] = own_blocks(batch, slots)
        return self._tables[batch, slots]

    def slots(self, places: Tensor) -> list[Tensor]:
        """Returns the slots in which the tokens at `places`, int64 [B, T], are stored: one tensor
        of that shape for each number of slots that layers have. A token without a place (-1) has no
        slot (-1)."""
        return [slots.of(places) for slots in self._slots.values()]

    def masks(self, places: Tensor, hidden: Tensor | None = None) -> list[Tensor]:
        """Returns a mask for each kind of layers, bool [B, 1, T, slots], for queries at `places`
        int64 [B, T].

        Queries with place -1 (padding) see the same as a query at place 0. `hidden`: bool [B, L],
        places that no query sees, or None. The masks must not be written to.
        """
        found, shown = [], {}
        if hidden is not None:
            shown = {size: ~s.in_slots(hidden, places) for size, s in self._slots.items()}
        for size, visible in self._visible:
            seen = visible[self._slots[size].rows[places]][:, None]
            found.append(seen if hidden is None else seen & shown[size][:, None, None])
        return found


class _Slots:
    """The slots for sequences of up to `length` tokens in a layer with `size` slots: token n is in
    slot n % `size`.

    `rows`: int64 [L + 1], the row of `_visible` for a query at each place; the last one is for the
    place -1.
    """

    def __init__(self, size: int, length: int) -> None:
        self._size, self._length = size, length
        place = torch.arange(length + 1, dtype=torch.int64, device="cpu")
        place[length] = 0
        self.rows = size - 1 - place
        if size < length:
            later = torch.where(place < size, 0, 2 * size - 1)
            self.rows = later + size - 1 - place % size
            self._of = place % size
            self._of[length] = -1

    def of(self, places: Tensor) -> Tensor:
        return places if self._size == self._length else self._of[places]

    def in_slots(self, what: Tensor, places: Tensor) -> Tensor:
        """Returns for each slot, bool [B, slots], the element of `what` that belongs to the token
        in the slot, after the tokens at `places` were written. `what`: bool [B, L], one element for
        each place."""
        if self._size == self._length:
            return what
        last = places.amax(1, keepdim=True).clamp(min=0)
        slot = torch.arange(self._size, dtype=torch.int64, device="cpu")
        place = last - (last - slot) % self._size  # below 0: an empty slot, which no query sees
        return what.gather(1, place.clamp(min=0))


def _visible(kind: LayerKind) -> Tensor:
    """Returns the slots that a query sees, bool [3 slots - 1, slots], a view of a small tensor.

    Row i, for i < slots, is for a query at place slots - 1 - i, before any slot is reused. Row 2
    slots - 1 + i is for a query at a later place p, with i = slots - 1 - p % slots: it sees the
    slots of the last `window` tokens, at either end of the ring.
    """
    size = kind.slots
    window = min(kind.window or size, size)
    ones = torch.zeros(2, 2 * size - 1, dtype=torch.bool, device="cpu")
    ones[:, size - window : size] = True
    ones[1, 2 * size - window :] = True
    return ones.flatten().unfold(0, size, 1)


def own_blocks(batch: int, length: int) -> Tensor:
    """Returns a block table in which each sequence has its own blocks: int32 [batch, length /
    16]."""
    own = torch.arange(batch, dtype=torch.int32, device="cpu")[:, None]
    return own.expand(batch, -(-length // TOKENS)).contiguous()


def named(kinds: Iterable[str], masks: list[Tensor]) -> Any:
    """Returns the masks as the model's forward takes them: one tensor, or a dict by kind of
    layers."""
    return masks[0] if [*kinds] == [""] else dict(zip(kinds, masks, strict=True))
