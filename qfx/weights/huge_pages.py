"""Memory in huge pages, so that a processor that reads all of it looks up fewer addresses."""

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
_LINE = 64  # bytes
_HUGEPAGE, _COLLAPSE = 14, 25  # of madvise: Linux 2.6.38 and 6.1


@lru_cache
def huge_page_size() -> int:
    """In bytes; 0 where the system has none, or its owner said that nobody gets any."""
    try:
        allowed = re.search(r"\[(\w+)\]", (_FOLDER / "enabled").read_text())
        size = int((_FOLDER / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 0
    return size if allowed and allowed[1] in ("always", "madvise") else 0


def into_huge_pages(blocks: Iterable[tuple[int, int]]) -> int:
    """Asks the system to put memory into huge pages, at the same addresses, where these blocks, of
    an address and a number of bytes each, make up half of one or more. Returns the bytes that it
    did so for; what it refuses stays as it is."""
    size = huge_page_size()
    return sum(_advise(first, count) for first, count in _runs(blocks, size)) if size else 0


class Room:
    """New memory for tensors that together take `count` bytes, one behind the other. It is there as
    long as one of them is; each has a storage of its own, its part."""

    def __init__(self, count: int) -> None:
        size = huge_page_size()
        self._memory = torch.empty(count + max(size, _LINE), dtype=torch.uint8, device="cpu")
        address = self._memory.data_ptr()
        self._taken = -address % max(size, _LINE)
        if size:  # before the memory is touched, when that costs nothing
            first, whole = ctypes.c_void_p(address + self._taken), ctypes.c_size_t(count)
            LIBC.madvise(first, whole, _HUGEPAGE)

    @staticmethod
    def of(counts: Iterable[int]) -> Room:
        """For tensors of so many bytes each."""
        return Room(sum(_whole_lines(count) for count in counts))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next tensor, on lines of its own."""
        count = prod(shape) * dtype.itemsize
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        begin, self._taken = self._taken, self._taken + _whole_lines(count)
        part: Any = (ctypes.c_byte * count).from_address(self._memory.data_ptr() + begin)
        part.room = self._memory
        return torch.frombuffer(part, dtype=dtype).view(tuple(shape))


def are_scattered(tensors: Sequence[Tensor]) -> bool:
    """Whether most of them lie elsewhere than a room would have them, behind the one before."""
    ends = [t.data_ptr() + _whole_lines(t.nbytes) for t in tensors]
    follow = [end == t.data_ptr() for end, t in zip(ends, tensors[1:], strict=False)]
    return 2 * sum(follow) < len(follow)


def _whole_lines(count: int) -> int:
    return -(-count // _LINE) * _LINE


def _runs(blocks: Iterable[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Of neighbouring pages that are half covered: where they begin, and their bytes."""
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
