"""The kernels of integer products, by the names that QFX_CUDA_KERNEL takes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.common import ROOT

PORTABLE = "portable"
VARIABLE = "QFX_CUDA_KERNEL"
SPLITS = (1, 2, 4)  # parts of K
MOST_TILES = 16  # of tokens: where there are more, a wider tile is faster
SMALL_M = 128  # up to here tiles are few, so that K is worth splitting


def named(operands: str) -> list[str]:
    """Returns the Hopper kernels of csrc/cuda/sm90/kernels.inc for "s8" or "b1" operands."""
    text = (ROOT / "csrc" / "cuda" / "sm90" / "kernels.inc").read_text()
    return re.findall(rf"^QFX_{operands.upper()}\((\w+),", text, re.M)


def choices(names: list[str], m: int) -> list[str]:
    """Returns the choices worth timing for m rows, of the correct kernels: Hopper kernels with
    splits of K, and the portable one."""
    small, least, widest = m <= SMALL_M, m // MOST_TILES, max(16, 2 * m)
    hopper = [name for name in names if name != PORTABLE]
    fitting = [n for n in hopper if (least <= _tokens(n) <= widest if "swap" in n else not small)]
    forced = [f"{n}/{s}" for n in fitting for s in (SPLITS if small else SPLITS[:1])]
    return [*([PORTABLE] if PORTABLE in names else []), *forced]


def _tokens(kernel: str) -> int:
    """Returns the rows of x in a tile of a kernel with swapped operands."""
    return int(kernel.partition("swap")[2])


@contextmanager
def forced(kernel: str) -> Iterator[None]:
    """Runs products on this kernel inside the context; qfx reads the variable at every call."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = kernel
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
