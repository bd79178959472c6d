"""Prefetch: the ways of fetching weights into caches ahead of their use, and which of them kernels
and programs try.

The kernels of a machine use one way for all matmuls, whatever the size of the weight. A program
tries more ways: it times its own weights, and may choose a way that would be wrong for others.
"""

from __future__ import annotations

from typing import NamedTuple

KERNELS, PROGRAMS = "kernels", "programs"


class Prefetch(NamedTuple):
    """A way of fetching weights: the `hint` of the prefetch instruction, which names the caches,
    how many bytes `ahead` of their use, and how many panels (`streams`) are read side by side. The
    hint '' stands for the setting of the kernels."""

    hint: str
    ahead: int = 0
    streams: int = 1


CANDIDATES: dict[Prefetch, tuple[str, ...]] = {
    Prefetch("t0", 1024): (PROGRAMS,),  # kernels: weights of 16 MB take a fifth longer at 256 bits
    Prefetch("t0", 2048): (KERNELS,),
    Prefetch("t0", 4096): (KERNELS, PROGRAMS),
    Prefetch("t0", 8192): (KERNELS,),
    Prefetch("t1", 1024): (PROGRAMS,),
    Prefetch("t1", 1024, 2): (PROGRAMS,),  # kernels choose the number of panels separately
    Prefetch("t1", 2048): (KERNELS,),
    Prefetch("t1", 4096): (KERNELS, PROGRAMS),
    Prefetch("t1", 4096, 2): (PROGRAMS,),
    Prefetch("t1", 8192): (KERNELS, PROGRAMS),
    Prefetch("nta", 2048): (KERNELS,),
    Prefetch("nta", 4096): (KERNELS, PROGRAMS),
    Prefetch("nta", 4096, 2): (PROGRAMS,),
    Prefetch("nta", 8192): (KERNELS,),
    Prefetch("nta", 16384): (PROGRAMS,),
}
STREAMS = (1, 2)


def tried_for(who: str) -> tuple[Prefetch, ...]:
    return tuple(way for way, tried in CANDIDATES.items() if who in tried)
