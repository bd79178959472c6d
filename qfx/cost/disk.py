"""Measurements of this machine, stored on disk in a folder that belongs to the user.

The files are
`<cache>/qfx/<kind>-<FORMAT>-<processor>-<torch>-<build>-<isa>-<threads>t-<dtype>.json`, stored as
described in `qfx/io/disk_memo.py`. The first line says how many processes have measured the file. A
table that did not settle, for example on a busy machine, is measured again by the next process,
TRIES times in all, and the best one is stored.
"""

from __future__ import annotations

import logging
import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch

from qfx.host.native_library import LIBRARY
from qfx.io.disk_memo import DiskMemo

log = logging.getLogger(__name__)

FORMAT = 20  # of the files, and of the set of measured values
TRIES = 3
_OURS = re.compile(r"([a-z_]+\d+|[a-z_\d]+-\d+)-.*\.json")  # also matches formats before 12
TABLES = DiskMemo("cost", "the cost tables", "", _OURS, 256, log)  # files of a few kB
Machine = tuple[torch.dtype, int, str]  # dtype, number of threads, instruction set


class Measurement(Protocol):
    """Times, or values derived from them. `spread`: how much two rounds of measuring differed.
    `settled`: whether the spread is small enough."""

    @property
    def spread(self) -> float: ...

    @property
    def settled(self) -> bool: ...

    def text(self) -> str: ...


T = TypeVar("T", bound=Measurement)


def read_or_measure(
    kind: str, machine: Machine, read: Callable[[str], T], measure: Callable[[], T]
) -> T:
    """Returns the measurement of this kind from the user's folder, or measures it and stores it
    there.

    `read` raises ValueError, KeyError or TypeError for a text that is not such a measurement.
    """
    return TABLES.get(_TableEntry(kind, machine, read, measure))


class _TableEntry(Generic[T]):
    """A measurement of one kind on one machine as a value of the disk cache. `_tries`, `_before`:
    how often a value that did not settle was measured, and that value."""

    def __init__(
        self, kind: str, machine: Machine, read: Callable[[str], T], measure: Callable[[], T]
    ) -> None:
        self._kind, self._machine, self._of_text, self._measure = kind, machine, read, measure
        self._tries = 0
        self._before: T | None = None

    def key(self) -> str:
        return file_name(self._kind, *self._machine)

    def read(self, data: bytes) -> T | None:
        first, _, text = data.decode("utf-8").partition("\n")
        tries, before = _count(first), self._of_text(text)
        if before.settled or tries >= TRIES:
            return before
        self._tries, self._before = tries, before
        log.info("%s: measured anew, as its spread was %.0f%%", self._kind, 100 * before.spread)
        return None

    def make(self) -> T:
        measured, before = self._measure(), self._before
        if before is not None and before.spread < measured.spread:
            return before
        return measured

    def written(self, value: T) -> bytes:
        return f"{self._tries + 1}\n{value.text()}".encode()


def _count(line: str) -> int:
    if re.fullmatch(r"[1-9]", line):
        return int(line)
    raise ValueError(f"it begins with {line[:40]!r}, not with how often it was measured")


def file_name(kind: str, dtype: torch.dtype, threads: int, isa: str) -> str:
    build = f"{LIBRARY.stat().st_mtime_ns:x}"  # another build has other kernels
    waits = "passive" if os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive" else ""
    shared = f"{threads}t{waits}"  # threads that sleep take thirty times as long to wake
    key = (cpu_name(), torch.__version__, build, isa, shared, str(dtype)[len("torch.") :])
    name = "-".join("".join(c if c.isalnum() else "_" for c in part) for part in key)
    return f"{kind}-{FORMAT}-{name}.json"


def cpu_name() -> str:
    """Returns the processor's model name, for file names and reports."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    wanted = ("model name", "cpu family", "model\t", "CPU part")
    seen = {line.split(":")[1].strip(): None for line in lines if line.startswith(wanted)}
    return " ".join(seen) or platform.processor() or platform.machine()
