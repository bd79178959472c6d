"""Memory in huge pages, which need fewer address translations when all of it is read."""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qfx.io.pages import LIBC

_FOLDER = Path("/sys/kernel/mm/transparent_hugepage")
_LINE = 64  # bytes of a cache line
_HUGEPAGE, _COLLAPSE = 14, 25  # arguments of madvise, since Linux 2.6.38 and 6.1


@lru_cache
def huge_page_size() -> int:
    """Returns the size of a huge page in bytes; 0 if the system has none, or is set not to use
    them."""
    try:
        allowed = re.search(r"\[(\w+)\]", (_FOLDER / "enabled").read_text())
        size = int((_FOLDER / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 0
    return size if allowed and allowed[1] in ("always", "madvise") else 0


def into_huge_pages(blocks: Iterable[tuple[int, int]]) -> int:
    """Asks the system to move memory into huge pages, at the same addresses.

    `blocks`: address and number of bytes of each block. Only pages that are at least half covered
    by blocks are moved. Returns the number of bytes that were moved; memory that the system refuses
    to move stays unchanged.
    """
    size = huge_page_size()
    return sum(_advise(first, count) for first, count in _runs(blocks, size)) if size else 0


class Room:
    """New memory for tensors that together take `count` bytes, one after another. Each tensor has
    its own storage, a part of this memory. The memory is freed when all of its tensors are."""

    def __init__(self, count: int) -> None:
        size = huge_page_size()
        self._memory = torch.empty(count + max(size, _LINE), dtype=torch.uint8, device="cpu")
        address = self._memory.data_ptr()
        self._taken = -address % max(size, _LINE)
        if size:  # before the memory is used; then nothing needs to be moved
            first, whole = ctypes.c_void_p(address + self._taken), ctypes.c_size_t(count)
            LIBC.madvise(first, whole, _HUGEPAGE)

    @staticmethod
    def of(counts: Iterable[int]) -> Room:
        """Returns room for tensors with these numbers of bytes."""
        return Room(sum(_whole_lines(count) for count in counts))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns the next tensor; it begins at a cache line."""
        count = prod(shape) * dtype.itemsize
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        begin, self._taken = self._taken, self._taken + _whole_lines(count)
        part: Any = (ctypes.c_byte * count).from_address(self._memory.data_ptr() + begin)
        part.room = self._memory
        return torch.frombuffer(part, dtype=dtype).view(tuple(shape))


def are_scattered(tensors: Sequence[Tensor]) -> bool:
    """Whether most of the tensors do not directly follow the one before, as they would in a
    Room."""
    ends = [t.data_ptr() + _whole_lines(t.nbytes) for t in tensors]
    follow = [end == t.data_ptr() for end, t in zip(ends, tensors[1:], strict=False)]
    return 2 * sum(follow) < len(follow)


def _whole_lines(count: int) -> int:
    return -(-count // _LINE) * _LINE


def _runs(blocks: Iterable[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Returns the runs of consecutive huge pages, of `size` bytes, that blocks cover by at least a
    half, as (address, bytes)."""
    covered: Counter[int] = Counter()
    for start, count in set(blocks):
        for page in range(start // size, -(-(start + count) // size)):
            covered[page] += min(start + count, (page + 1) * size) - max(start, page * size)
    runs: list[tuple[int, int]] = []
    for page in sorted(page for page, count in covered.items() if 2 * count >= size):
        if runs and sum(runs[-1]) == page * size:
            runs[-1] = runs[-1][0], runs[-1][1] + size
        else:
            runs.append((page * size, size))
    return runs


def _advise(first: int, count: int) -> int:
    start, length = ctypes.c_void_p(first), ctypes.c_size_t(count)
    if LIBC.madvise(start, length, _HUGEPAGE):
        return 0
    return 0 if LIBC.madvise(start, length, _COLLAPSE) else count
