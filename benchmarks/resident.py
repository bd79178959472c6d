"""Resident memory of this process, which Linux counts in /proc."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

_STATUS = Path("/proc/self/status")


def resident() -> int:
    """Returns bytes, after free memory was returned to the system (glibc)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))
