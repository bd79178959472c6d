"""Regions of memory that a program uses, and their places in the memory of its own."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

_LINE = 64


class RegionKind(Enum):
    """The owner of a region's memory."""

    OWN = "of the program, reused when nobody reads it any more"
    CONSTANT = "a parameter or a buffer"
    NUMBER = "a number of the graph"
    INPUT = "an input"
    SHARED = "between two programs, or of what PyTorch runs between them"
    RESULT = "allocated at each run"


@dataclass(eq=False)
class Region:
    """The memory of one storage. `first`, `last`: the numbers of the first and the last step that
    use it."""

    kind: RegionKind
    bytes: int
    tensor: Tensor | None = None  # of a constant or a number
    first: int = -1
    last: int = -1

    def used_at(self, step: int) -> None:
        self.first = step if self.first < 0 else self.first
        self.last = step


def lay_out(regions: Iterable[Region]) -> tuple[dict[Region, int], int]:
    """Returns the first byte of each region, and the bytes in all. Regions that are in use at the
    same step do not overlap. The largest regions are placed first, each in the first gap between
    those placed before it."""
    placed: list[tuple[int, int, Region]] = []  # sorted by first byte
    for number, region in enumerate(sorted(regions, key=lambda r: -r.bytes)):
        begin = 0
        for start, _, other in placed:
            apart = other.last < region.first or region.last < other.first
            if apart or start + other.bytes <= begin:
                continue
            if begin + region.bytes <= start:
                break
            begin = -(-(start + other.bytes) // _LINE) * _LINE
        insort(placed, (begin, number, region))
    begins = {region: begin for begin, _, region in placed}
    return begins, max((begin + r.bytes for begin, _, r in placed), default=0)
