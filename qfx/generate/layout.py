"""CacheLayout: which layers of a cache hold all tokens, and which are rings of the last ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qfx.ops.kv_blocks import ring_slots


class LayerKind(NamedTuple):
    """`window`: keys that a query sees, None of all. `slots`: tokens that a layer holds; token n of
    a text lies at slot n % slots."""

    window: int | None
    slots: int


@dataclass(frozen=True)
class CacheLayout:
    """`length`: tokens of a text that there is room for. `kinds`: of layers, by name. `layers`: the
    name of each layer's kind."""

    length: int
    kinds: dict[str, LayerKind]
    layers: tuple[str, ...]

    @property
    def slots(self) -> tuple[int, ...]:
        """The numbers of slots that layers have, each once. Layers with equal numbers are written
        at the same slots and have the same block table."""
        return tuple(dict.fromkeys(kind.slots for kind in self.kinds.values()))

    @property
    def firsts(self) -> tuple[int, ...]:
        """For each of `slots` the first layer that has so many; 0 where no layer has."""
        found = [self.slots_of(i) for i in range(len(self.layers))]
        return tuple(found.index(slots) if slots in found else 0 for slots in self.slots)

    def slots_of(self, layer: int) -> int:
        return self.kinds[self.layers[layer]].slots


def with_rings(
    length: int, windows: Mapping[str, int | None], layers: Sequence[str]
) -> CacheLayout:
    """The layout in which layers with a window are rings, where these are smaller than `length`."""
    kinds = {
        name: LayerKind(window, length if window is None else min(length, ring_slots(window)))
        for name, window in windows.items()
    }
    return CacheLayout(length, kinds, tuple(layers))


def without_rings(length: int, windows: Mapping[str, int | None], layers: int) -> CacheLayout:
    """The layout of a model of which the kinds of its layers do not matter: all hold all tokens."""
    kinds = {name: LayerKind(window, length) for name, window in windows.items()}
    return CacheLayout(length, kinds, (next(iter(kinds)),) * layers)
