"""Memory layout: the places of the regions in a program's own memory."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from qfx.programs.bytecode import Region

_LINE = 64


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
