"""Cost: what a matmul takes on this machine in float and in int8, measured once, kept on disk.

A grid of square matmuls is timed with the real operators, and the time of a site is interpolated
from it: linear in log(M) and log(sqrt(K N)), of the logarithm of the time per multiply-accumulate.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F

import qfx._C as _C
from qfx.plan import Estimate
from qfx.scheme import QSpec, Scheme
from qfx.weights import pack

log = logging.getLogger(__name__)

FORMAT = 1  # of the file, and of what is measured
ROWS = (1, 4, 16, 64, 256)
SIZES = (64, 256, 1024, 2048)
ROUNDS = 5
Grid = tuple[tuple[float, ...], ...]  # seconds, [ROWS][SIZES]


@dataclass(frozen=True)
class CostTable:
    """Seconds of a bias-free linear on a grid of M x (K = N); quantization per element."""

    float_s: Grid
    int8_s: Grid  # int8_linear_dynamic, asymmetric
    symmetric_saving: float  # seconds per activation element that a symmetric scheme saves

    def estimate(self, m: int, k: int, n: int, dtype: torch.dtype, scheme: Scheme) -> Estimate:
        """Predicted times of x [m, k] @ w [n, k].T; the table belongs to one dtype."""
        int8_s = _interpolate(self.int8_s, m, k, n)
        if scheme.x.symmetric:
            int8_s = max(int8_s - self.symmetric_saving * m * k, int8_s / 2)
        return Estimate(_interpolate(self.float_s, m, k, n), int8_s)


class MachineCost:
    """The cost model of this machine: one table per dtype, thread count and instruction set."""

    def estimate(self, m: int, k: int, n: int, dtype: torch.dtype, scheme: Scheme) -> Estimate:
        return table(dtype, torch.get_num_threads(), _C.isa()).estimate(m, k, n, dtype, scheme)


@lru_cache
def table(dtype: torch.dtype, threads: int, isa: str) -> CostTable:
    """Reads the table from the cache directory, or measures and keeps it (about a second)."""
    path = _path(dtype, threads, isa)
    try:
        return _from_json(path.read_text())
    except (OSError, ValueError, KeyError, TypeError) as why:
        log.info("measuring the cost model: %s", why)
    measured = measure(dtype)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(asdict(measured)))
        partial.replace(path)
    except OSError as why:
        log.warning("the cost model cannot be kept in %s: %s", path, why)
    return measured


def _path(dtype: torch.dtype, threads: int, isa: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    build = f"{Path(_C.__file__).stat().st_mtime_ns:x}"  # another build has other kernels
    key = (cpu_name(), torch.__version__, build, isa, f"{threads}t", str(dtype)[len("torch.") :])
    name = "-".join("".join(c if c.isalnum() else "_" for c in part) for part in key)
    return cache / "qfx" / f"cost{FORMAT}-{name}.json"


def cpu_name() -> str:
    """The processor's model name, for file names and reports."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    wanted = ("model name", "cpu family", "model\t", "CPU part")
    seen = {line.split(":")[1].strip(): None for line in lines if line.startswith(wanted)}
    return " ".join(seen) or platform.processor() or platform.machine()


def _from_json(text: str) -> CostTable:
    raw = json.loads(text)
    grids = {name: tuple(map(tuple, raw[name])) for name in ("float_s", "int8_s")}
    for grid in grids.values():
        if len(grid) != len(ROWS) or any(len(row) != len(SIZES) for row in grid):
            raise ValueError("the kept grid has another shape")
        if not all(isinstance(t, float) and t > 0 for row in grid for t in row):
            raise ValueError("the kept grid holds a time that is not positive")
    return CostTable(**grids, symmetric_saving=float(raw["symmetric_saving"]))


def measure(dtype: torch.dtype) -> CostTable:
    """Times the grid with the operators themselves, float and int8 in turns; medians."""
    with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
        cells = [[_cell(m, size, dtype) for size in SIZES] for m in ROWS]
        saving = _symmetric_saving(dtype)
    float_s, int8_s = (tuple(tuple(c[i] for c in row) for row in cells) for i in range(2))
    return CostTable(float_s, int8_s, saving)


def _cell(m: int, size: int, dtype: torch.dtype) -> list[float]:
    x, w = _random(m, size, dtype), _random(size, size, dtype)
    packed = pack(w, False, QSpec())
    op = torch.ops.qfx.int8_linear_dynamic
    return medians(
        lambda: F.linear(x, w),
        lambda: op(x, *packed, None, [1], 8, False, "none", dtype),
    )


def _symmetric_saving(dtype: torch.dtype, m: int = 256, k: int = 1024) -> float:
    x = _random(m, k, dtype)
    asymmetric, symmetric = medians(
        lambda: torch.ops.qfx.quantize(x, [1], 8, False),
        lambda: torch.ops.qfx.quantize(x, [1], 8, True),
    )
    return max(asymmetric - symmetric, 0.0) / (m * k)


def _random(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)  # the user's random state is left alone
    return torch.randn(rows, columns, generator=generator).to(dtype)


def medians(*calls: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    """Median seconds of each call, measured in turns; short calls are repeated within a turn."""
    repeats = []
    for call in calls:
        call()
        once = _seconds(call, 1)
        repeats.append(max(1, min(200, int(2e-4 / max(once, 1e-7)))))
    times = [[_seconds(c, r) for c, r in zip(calls, repeats, strict=True)] for _ in range(rounds)]
    return [sorted(column)[rounds // 2] for column in zip(*times, strict=True)]


def _seconds(call: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return max((time.perf_counter() - start) / repeats, 1e-9)


def _interpolate(grid: Grid, m: int, k: int, n: int) -> float:
    macs = max(m, 1) * max(k, 1) * max(n, 1)
    i, a = _between(ROWS, max(m, 1))
    j, b = _between(SIZES, math.sqrt(max(k, 1) * max(n, 1)))
    corners = [(i, j, (1 - a) * (1 - b)), (i, j + 1, (1 - a) * b)]
    corners += [(i + 1, j, a * (1 - b)), (i + 1, j + 1, a * b)]
    per_mac = sum(
        weight * math.log(grid[r][c] / (ROWS[r] * SIZES[c] ** 2)) for r, c, weight in corners
    )
    overhead = min(grid[0])  # a call never takes less than the smallest one measured
    return max(math.exp(per_mac) * macs, overhead)


def _between(points: tuple[int, ...], at: float) -> tuple[int, float]:
    """(i, t): `at` lies at fraction t of the way from point i to i + 1 (logarithms, clamped)."""
    i = min(max(bisect_right(points, at) - 1, 0), len(points) - 2)
    t = math.log(at / points[i]) / math.log(points[i + 1] / points[i])
    return i, min(max(t, 0.0), 1.0)
