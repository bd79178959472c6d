"""Memory pages of this process on Linux: finds pages that are backed by a file, and frees them."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from array import array

_SWAPPED, _FILE, _PRESENT = 1 << 62, 1 << 61, 1 << 63  # bits in /proc/self/pagemap
LIBC = ctypes.CDLL(None, use_errno=True)


def whole_pages(start: int, count: int) -> tuple[int, int]:
    """Returns the addresses of the begin and end of the whole pages within `count` bytes from the
    address `start`."""
    size = mmap.PAGESIZE
    first = -(-start // size) * size
    return first, max(first, (start + count) // size * size)


def is_of_a_file(start: int, count: int) -> bool:
    """Whether all pages of these bytes are backed by a file or are shared memory, or are not in
    memory.

    A page that was written since it was mapped is not backed by the file. Raises OSError if the
    system does not say: it is not Linux, or hides /proc.
    """
    first, end = whole_pages(start, count)
    if sys.platform != "linux":
        raise OSError(f"{sys.platform} does not say which pages are those of a file")
    entries = array("Q")
    with open("/proc/self/pagemap", "rb", buffering=0) as account:
        account.seek(first // mmap.PAGESIZE * entries.itemsize)
        entries.frombytes(account.read((end - first) // mmap.PAGESIZE * entries.itemsize))
    return not any(page & _SWAPPED or (page & _PRESENT and not page & _FILE) for page in entries)


def drop(start: int, count: int) -> None:
    """Frees the pages of these bytes, for which `is_of_a_file` must be true; the next access loads
    them from the file. The system itself may do this at any time. Raises OSError if the system
    refuses."""
    first, end = whole_pages(start, count)
    length = ctypes.c_size_t(end - first)
    if end > first and LIBC.madvise(ctypes.c_void_p(first), length, mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def trim() -> None:
    """Gives memory that was freed, but that the allocator keeps, back to the system. Does nothing
    if the C library is not glibc."""
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)
