"""Resident memory of this process, which Linux counts in /proc."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

_STATUS, _FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident() -> int:
    """Returns bytes, after free memory was returned to the system (glibc)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return _bytes("VmRSS")


def forget_peak() -> None:
    _FORGET.write_text("5")


def peak() -> int:
    """Returns the maximum in bytes since `forget_peak`."""
    return _bytes("VmHWM")


def _bytes(kind: str) -> int:
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))
