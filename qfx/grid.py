"""Grids of measured times: interpolation between their points, and the files that keep them.

The time at a size is linear in the logarithms of the sizes, of the logarithm of the time per
multiply-accumulate.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

import qfx._C as _C

log = logging.getLogger(__name__)

FORMAT = 6  # of the files, and of what is measured
Axes = tuple[tuple[int, ...], ...]
Grid = tuple[tuple[tuple[float, ...], ...], ...]  # seconds, by the sizes of the axes
Table = TypeVar("Table")
Machine = tuple[torch.dtype, int, str]  # with so many threads, on this instruction set


def kept(
    kind: str, machine: Machine, read: Callable[[str], Table], measure: Callable[[], Table]
) -> Table:
    """The table of this kind from the cache directory, or measured now and kept there."""
    path = _path(kind, *machine)
    try:
        return read(path.read_text())
    except (OSError, ValueError, KeyError, TypeError) as why:
        log.info("measuring the cost model: %s", why)
    measured = measure()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(asdict(cast(Any, measured))))
        partial.replace(path)
    except OSError as why:
        log.warning("the cost model cannot be kept in %s: %s", path, why)
    return measured


def _path(kind: str, dtype: torch.dtype, threads: int, isa: str) -> Path:
    home = os.path.expanduser("~")  # stays "~" for a user without a home, as in some containers
    home = tempfile.gettempdir() if home == "~" else home
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache"))
    build = f"{Path(_C.__file__).stat().st_mtime_ns:x}"  # another build has other kernels
    key = (cpu_name(), torch.__version__, build, isa, f"{threads}t", str(dtype)[len("torch.") :])
    name = "-".join("".join(c if c.isalnum() else "_" for c in part) for part in key)
    return cache / "qfx" / f"{kind}{FORMAT}-{name}.json"


def cpu_name() -> str:
    """The processor's model name, for file names and reports."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    wanted = ("model name", "cpu family", "model\t", "CPU part")
    seen = {line.split(":")[1].strip(): None for line in lines if line.startswith(wanted)}
    return " ".join(seen) or platform.processor() or platform.machine()


def checked_grid(raw: list[list[list[float]]], axes: Axes) -> Grid:
    grid = tuple(tuple(map(tuple, plane)) for plane in raw)
    shape = torch.tensor(grid, dtype=torch.float64).shape
    if shape != tuple(map(len, axes)):
        raise ValueError(f"the kept grid has shape {tuple(shape)}")
    if not all(t > 0 for plane in grid for row in plane for t in row):
        raise ValueError("the kept grid holds a time that is not positive")
    return grid


@contextmanager
def undisturbed() -> Iterator[None]:
    """Neither gradients nor the caller's autocast nor a mode such as Dynamo's."""
    modes_off = torch.utils._python_dispatch._disable_current_modes()
    with torch.no_grad(), torch.autocast("cpu", enabled=False), modes_off:
        yield


def measured_grids(axes: Axes, cell: Callable[[int, int, int], list[float]]) -> tuple[Grid, Grid]:
    """The two times of each cell, as two grids."""
    cells = [[[cell(m, k, n) for n in axes[2]] for k in axes[1]] for m in axes[0]]
    float_s, int8_s = (
        tuple(tuple(tuple(times[i] for times in row) for row in plane) for plane in cells)
        for i in range(2)
    )
    return float_s, int8_s


def random(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)  # the user's random state is left alone
    return torch.randn(rows, columns, generator=generator).to(dtype)


def interpolate(grid: Grid, axes: Axes, at: tuple[int, int, int]) -> float:
    places = [_between(points, max(size, 1)) for points, size in zip(axes, at, strict=True)]
    log_per_mac = 0.0
    for corner in product((0, 1), repeat=3):
        m, k, n = (i + step for (i, _), step in zip(places, corner, strict=True))
        macs = axes[0][m] * axes[1][k] * axes[2][n]
        share = math.prod(t if step else 1 - t for (_, t), step in zip(places, corner, strict=True))
        log_per_mac += share * math.log(grid[m][k][n] / macs)
    overhead = min(grid[0][0])  # a call never takes less than the smallest one measured
    return max(math.exp(log_per_mac) * math.prod(max(size, 1) for size in at), overhead)


def _between(points: tuple[int, ...], at: float) -> tuple[int, float]:
    """(i, t): `at` lies at fraction t of the way from point i to i + 1 (logarithms, clamped)."""
    i = min(max(bisect_right(points, at) - 1, 0), len(points) - 2)
    t = math.log(at / points[i]) / math.log(points[i + 1] / points[i])
    return i, min(max(t, 0.0), 1.0)
