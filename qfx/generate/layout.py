"""CacheLayout: which layers of a KV cache hold all tokens, and which are ring buffers of the last
ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qfx.ops.kv_blocks import ring_slots


class LayerKind(NamedTuple):
    """The size of the cache of one kind of layers, such as those with a sliding window.

    `window`: the number of keys that a query sees, None for all. `slots`: the number of tokens that
    a layer holds; token n of a sequence is in slot n % slots.
    """

    window: int | None
    slots: int


@dataclass(frozen=True)
class CacheLayout:
    """The sizes of the layers of a KV cache.

    `length`: the largest number of tokens of a sequence. `kinds`: the kinds of layers, by name.
    `layers`: the name of the kind of each layer.
    """

    length: int
    kinds: dict[str, LayerKind]
    layers: tuple[str, ...]

    @property
    def slots(self) -> tuple[int, ...]:
        """The distinct numbers of slots of the layers. Layers with the same number are written at
        the same slots and have the same block table."""
        return tuple(dict.fromkeys(kind.slots for kind in self.kinds.values()))

    @property
    def firsts(self) -> tuple[int, ...]:
        """The index of the first layer with each number of slots in `slots`; 0 if no layer has
        it."""
        found = [self.slots_of(i) for i in range(len(self.layers))]
        return tuple(found.index(slots) if slots in found else 0 for slots in self.slots)

    def slots_of(self, layer: int) -> int:
        return self.kinds[self.layers[layer]].slots


def with_rings(
    length: int, windows: Mapping[str, int | None], layers: Sequence[str]
) -> CacheLayout:
    """Returns the layout in which layers with a window are rings, if these are smaller than
    `length`."""
    kinds = {
        name: LayerKind(window, length if window is None else min(length, ring_slots(window)))
        for name, window in windows.items()
    }
    return CacheLayout(length, kinds, tuple(layers))


def without_rings(length: int, windows: Mapping[str, int | None], layers: int) -> CacheLayout:
    """Returns the layout in which all layers hold all tokens, for models that do not say which
    layer is of which kind."""
    kinds = {name: LayerKind(window, length) for name, window in windows.items()}
    return CacheLayout(length, kinds, (next(iter(kinds)),) * layers)
