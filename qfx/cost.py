"""Cost: what a matmul takes on this machine in float and in int8, measured once, kept on disk.

A grid of shapes is timed with the real operators, and the time of a site is interpolated from it:
linear in log(M), log(K) and log(N), of the logarithm of the time per multiply-accumulate. Batched
products of two computed operands have a grid of their own, measured when one is first asked for.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import TypeVar

import torch
import torch.nn.functional as F

import qfx._C as _C
from qfx.plan import Estimate
from qfx.scheme import QSpec, Scheme
from qfx.weights import pack

log = logging.getLogger(__name__)

FORMAT = 3  # of the file, and of what is measured
AXES = ((1, 4, 16, 64, 256), (16, 128, 768, 2048), (8, 64, 512, 2048))  # M, K, N
BMM_AXES = ((1, 8, 64, 256), (32, 64, 128, 512), (32, 64, 128, 512))  # M, K, N of each matrix
BMM_BATCH = 8
ROUNDS = 5
Axes = tuple[tuple[int, ...], ...]
Grid = tuple[tuple[tuple[float, ...], ...], ...]  # seconds, [M][K][N]
Table = TypeVar("Table", "CostTable", "BmmTable")


@dataclass(frozen=True)
class CostTable:
    """Seconds of a bias-free linear on the grid of AXES."""

    float_s: Grid
    int8_s: Grid  # int8_linear_dynamic, asymmetric
    symmetric_saving: float  # seconds per row of activations that a symmetric scheme saves
    weight_s: float  # seconds per element to quantize and pack a weight, and again for backward
    codes_s: float  # seconds per element to dequantize activations in the backward

    def estimate(self, m: int, k: int, n: int, dtype: torch.dtype, scheme: Scheme) -> Estimate:
        """Predicted times of x [m, k] @ w [n, k].T; the table belongs to one dtype."""
        int8_s = _interpolate(self.int8_s, AXES, (m, k, n))
        if scheme.x.symmetric:
            int8_s = max(int8_s - self.symmetric_saving * m, int8_s / 2)
        return Estimate(_interpolate(self.float_s, AXES, (m, k, n)), int8_s)

    def training(self, m: int, k: int, n: int) -> float:
        """Seconds that a training step adds to the int8 forward of a weight that trains."""
        return n * k * self.weight_s + m * k * self.codes_s


@dataclass(frozen=True)
class BmmTable:
    """Seconds of BMM_BATCH products on the grid of BMM_AXES, and of a call with little to do."""

    float_s: Grid  # torch.matmul
    int8_s: Grid  # int8_bmm_dynamic, asymmetric
    float_call_s: float
    int8_call_s: float

    def estimate(self, batch: int, m: int, k: int, n: int) -> Estimate:
        """Predicted times of a [batch, m, k] @ b [batch, n, k].mT. A size below the grid's smallest
        counts as that one: vectors are not shorter."""
        m, k, n = (max(size, points[0]) for size, points in zip((m, k, n), BMM_AXES, strict=True))

        def seconds(grid: Grid, call: float) -> float:
            matrices = max(_interpolate(grid, BMM_AXES, (m, k, n)) - call, 0.0)
            return call + matrices * batch / BMM_BATCH

        return Estimate(
            seconds(self.float_s, self.float_call_s), seconds(self.int8_s, self.int8_call_s)
        )


class MachineCost:
    """The cost model of this machine: one table per dtype, thread count and instruction set."""

    def estimate(self, m: int, k: int, n: int, dtype: torch.dtype, scheme: Scheme) -> Estimate:
        return table(dtype, torch.get_num_threads(), _C.isa()).estimate(m, k, n, dtype, scheme)

    def training(self, m: int, k: int, n: int, dtype: torch.dtype) -> float:
        return table(dtype, torch.get_num_threads(), _C.isa()).training(m, k, n)

    def estimate_bmm(self, batch: int, m: int, k: int, n: int, dtype: torch.dtype) -> Estimate:
        """Predicted times of a [batch, m, k] @ b [batch, n, k].mT, both computed."""
        return bmm_table(dtype, torch.get_num_threads(), _C.isa()).estimate(batch, m, k, n)


@lru_cache
def table(dtype: torch.dtype, threads: int, isa: str) -> CostTable:
    """Reads the table from the cache directory, or measures and keeps it (about a second)."""
    return _kept(_path("cost", dtype, threads, isa), _from_json, lambda: measure(dtype))


@lru_cache
def bmm_table(dtype: torch.dtype, threads: int, isa: str) -> BmmTable:
    """The same for batched products."""
    return _kept(_path("bmm", dtype, threads, isa), _bmm_from_json, lambda: measure_bmm(dtype))


def _kept(path: Path, read: Callable[[str], Table], measure: Callable[[], Table]) -> Table:
    try:
        return read(path.read_text())
    except (OSError, ValueError, KeyError, TypeError) as why:
        log.info("measuring the cost model: %s", why)
    measured = measure()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(asdict(measured)))
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


def _from_json(text: str) -> CostTable:
    raw = json.loads(text)
    float_s, int8_s = (_checked_grid(raw[name], AXES) for name in ("float_s", "int8_s"))
    others = (float(raw[name]) for name in ("symmetric_saving", "weight_s", "codes_s"))
    return CostTable(float_s, int8_s, *others)


def _bmm_from_json(text: str) -> BmmTable:
    raw = json.loads(text)
    float_s, int8_s = (_checked_grid(raw[name], BMM_AXES) for name in ("float_s", "int8_s"))
    return BmmTable(float_s, int8_s, float(raw["float_call_s"]), float(raw["int8_call_s"]))


def _checked_grid(raw: list[list[list[float]]], axes: Axes) -> Grid:
    grid = tuple(tuple(map(tuple, plane)) for plane in raw)
    shape = torch.tensor(grid, dtype=torch.float64).shape
    if shape != tuple(map(len, axes)):
        raise ValueError(f"the kept grid has shape {tuple(shape)}")
    if not all(t > 0 for plane in grid for row in plane for t in row):
        raise ValueError("the kept grid holds a time that is not positive")
    return grid


def measure(dtype: torch.dtype) -> CostTable:
    """Times the grid with the operators themselves, float and int8 in turns."""
    with _undisturbed():
        float_s, int8_s = _grids(AXES, lambda m, k, n: _cell(m, k, n, dtype))
        saving = _symmetric_saving(dtype)
        training = _training(dtype)
    return CostTable(float_s, int8_s, saving, *training)


def measure_bmm(dtype: torch.dtype) -> BmmTable:
    with _undisturbed():
        grids = _grids(BMM_AXES, lambda m, k, n: _bmm_cell(BMM_BATCH, m, k, n, dtype))
        calls = _bmm_cell(1, 1, 8, 8, dtype)
    return BmmTable(*grids, *calls)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Neither gradients nor the caller's autocast nor a mode such as Dynamo's."""
    modes_off = torch.utils._python_dispatch._disable_current_modes()
    with torch.no_grad(), torch.autocast("cpu", enabled=False), modes_off:
        yield


def _grids(axes: Axes, cell: Callable[[int, int, int], list[float]]) -> tuple[Grid, Grid]:
    """The two times of each cell, as two grids."""
    cells = [[[cell(m, k, n) for n in axes[2]] for k in axes[1]] for m in axes[0]]
    float_s, int8_s = (
        tuple(tuple(tuple(times[i] for times in row) for row in plane) for plane in cells)
        for i in range(2)
    )
    return float_s, int8_s


def _cell(m: int, k: int, n: int, dtype: torch.dtype) -> list[float]:
    x, w = _random(m, k, dtype), _random(n, k, dtype)
    packed = pack(w, (), QSpec())
    op = torch.ops.qfx.int8_linear_dynamic
    return fastest(
        lambda: F.linear(x, w),
        lambda: op(x, *packed, None, [1], 8, False, "none", dtype),
    )


def _bmm_cell(batch: int, m: int, k: int, n: int, dtype: torch.dtype) -> list[float]:
    """As in attention, b is contiguous along its features, the shorter of K and N."""
    a = _random(batch * m, k, dtype).reshape(batch, m, k)
    b = _random(batch * n, k, dtype).reshape(batch, n, k)
    b = b if k <= n else b.mT.contiguous().mT
    return fastest(
        lambda: torch.matmul(a, b.mT),
        lambda: torch.ops.qfx.int8_bmm_dynamic(a, b, [1], 8, False, 8, dtype),
    )


def _symmetric_saving(dtype: torch.dtype, m: int = 1024, k: int = 64) -> float:
    """Both kinds make the same pass over a row; a zero point costs a little more for each row."""
    x = _random(m, k, dtype)
    asymmetric, symmetric = fastest(
        lambda: torch.ops.qfx.quantize(x, [1], 8, False),
        lambda: torch.ops.qfx.quantize(x, [1], 8, True),
    )
    return max(asymmetric - symmetric, 0.0) / m


def _training(dtype: torch.dtype, size: int = 512) -> list[float]:
    """Per element: what a weight costs in both directions, and dequantizing activations."""
    w = _random(size, size, dtype)
    q, scale, zero_point = torch.ops.qfx.quantize(w, [1], 8, False)
    like = (scale, zero_point, None, None, "none", dtype)
    weight, again, codes = fastest(
        lambda: pack(w, (), QSpec()),
        lambda: torch.ops.qfx.fake_quantize(w, [1], 8, True, dtype),
        lambda: torch.ops.qfx.dequantize(q, *like),
    )
    return [(weight + again) / size**2, codes / size**2]


def _random(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)  # the user's random state is left alone
    return torch.randn(rows, columns, generator=generator).to(dtype)


def fastest(*calls: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    """Least seconds of each call, in turns: what it takes when nothing else disturbs it."""
    return [min(times) for times in in_turns(*calls, rounds=rounds)]


def medians(*calls: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    """Median seconds of each call, in turns."""
    return [sorted(times)[rounds // 2] for times in in_turns(*calls, rounds=rounds)]


def in_turns(*calls: Callable[[], object], rounds: int) -> list[tuple[float, ...]]:
    """Seconds of each call in each round; short calls are repeated within a round."""
    repeats = []
    for call in calls:
        call()
        once = _seconds(call, 1)
        repeats.append(max(1, min(200, int(2e-4 / max(once, 1e-7)))))
    times = [[_seconds(c, r) for c, r in zip(calls, repeats, strict=True)] for _ in range(rounds)]
    return list(zip(*times, strict=True))


def _seconds(call: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return max((time.perf_counter() - start) / repeats, 1e-9)


def _interpolate(grid: Grid, axes: Axes, at: tuple[int, int, int]) -> float:
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
