"""What was measured once on this machine, kept on disk in a folder of the user's own.

`<cache>/qfx/<kind>-<FORMAT>-<processor>-<torch>-<build>-<isa>-<threads>t-<dtype>.json`, MOST of
them (qfx/io/disk_cache.py). The first line says how many processes have measured it: what did
not settle, as on a busy machine, is measured again by the next one, TRIES times in all, and the
best stays. Without a folder of the user's own nothing is kept.
"""

from __future__ import annotations

import logging
import os
import platform
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Protocol, TypeVar

import torch

import qfx._C as _C
from qfx.io.disk_cache import DiskCache, user_folder

log = logging.getLogger(__name__)

FORMAT = 15  # of the files, and of what is measured
MOST = 256  # files of a few kB
TRIES = 3
_OURS = re.compile(r"([a-z_]+\d+|[a-z_\d]+-\d+)-.*\.json")  # those of formats before 12 too
Machine = tuple[torch.dtype, int, str]  # with so many threads, on this instruction set


class Measured(Protocol):
    """Times, or what follows from them. `spread`: how far two rounds of measuring were apart;
    `settled`: near enough."""

    @property
    def spread(self) -> float: ...

    @property
    def settled(self) -> bool: ...

    def text(self) -> str: ...


T = TypeVar("T", bound=Measured)


def kept(kind: str, machine: Machine, read: Callable[[str], T], measure: Callable[[], T]) -> T:
    """What is measured of this kind, from the user's folder, or measured now and kept there.

    `read` raises ValueError, KeyError or TypeError for a text that is none of it.
    """
    cache = _cache()
    if cache is None:
        return measure()
    key = _name(kind, *machine)
    tries, before = 0, None
    try:
        first, _, text = cache.read(key).decode("utf-8").partition("\n")
        tries, before = _count(first), read(text)
        if before.settled or tries >= TRIES:
            return before
        log.info("%s: measured anew, as its spread was %.0f%%", kind, 100 * before.spread)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as why:
        log.info("%s: measured, as there is none: %s", kind, why)
    measured = measure()
    if before is not None and before.spread < measured.spread:
        measured = before
    try:
        cache.write(key, f"{tries + 1}\n{measured.text()}".encode())
    except (OSError, ValueError) as why:
        log.warning("the cost model cannot be kept in %s: %s", cache.folder / key, why)
    return measured


def _count(line: str) -> int:
    if re.fullmatch(r"[1-9]", line):
        return int(line)
    raise ValueError(f"it begins with {line[:40]!r}, not with how often it was measured")


def _cache() -> DiskCache | None:
    """Where tables are kept, or None, which the log says once."""
    try:
        return DiskCache(user_folder(), _OURS, MOST)
    except (OSError, ValueError) as why:
        return _none(str(why))


@lru_cache
def _none(why: str) -> None:
    log.warning("the cost model is measured in each process, and not kept: %s", why)


def _name(kind: str, dtype: torch.dtype, threads: int, isa: str) -> str:
    build = f"{Path(_C.__file__).stat().st_mtime_ns:x}"  # another build has other kernels
    waits = "passive" if os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive" else ""
    shared = f"{threads}t{waits}"  # threads that sleep take thirty times as long to wake
    key = (cpu_name(), torch.__version__, build, isa, shared, str(dtype)[len("torch.") :])
    name = "-".join("".join(c if c.isalnum() else "_" for c in part) for part in key)
    return f"{kind}-{FORMAT}-{name}.json"


def cpu_name() -> str:
    """The processor's model name, for file names and reports."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    wanted = ("model name", "cpu family", "model\t", "CPU part")
    seen = {line.split(":")[1].strip(): None for line in lines if line.startswith(wanted)}
    return " ".join(seen) or platform.processor() or platform.machine()
