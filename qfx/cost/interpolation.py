"""Grids of measured times, and interpolation between their points.

A linear takes a fixed time, and some for each row, column, feature, and product of these: between
neighbouring points the time is linear in each size, and beyond the last two it goes on so. Batches
have sparser grids: there the logarithm of the time per multiply-accumulate is linear in those of
the sizes, which predicted them better.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any, cast

import torch

from qfx.cost.tables import nested, positive
from qfx.host.tensors import without_modes

Axes = tuple[tuple[int, ...], ...]
Timing = Callable[[int], Sequence[float]]  # M -> seconds in float and in int8
Grid = tuple[tuple[tuple[float, ...], ...], ...]  # seconds, by the sizes of the axes
LARGEST = 2**28  # multiply-adds of a cell that is timed
SWEEPS = 2  # over a grid, the lesser time counting: what disturbs often lasts for many cells
ROUNDS = 2  # of a cell in each


def checked_grid(raw: Any, axes: Axes) -> Grid:
    """Nested lists of times on these axes, as tuples; ValueError for anything else."""
    return cast(Grid, nested(raw, tuple(map(len, axes)), positive))


@contextmanager
def undisturbed() -> Iterator[None]:
    """Neither gradients nor the caller's autocast nor a mode such as Dynamo's. Nor inference mode,
    in which operators skip the dispatch to their gradients that compiled graphs go through."""
    modes_off = without_modes()
    autocast_off = torch.autocast("cpu", enabled=False)
    with torch.inference_mode(False), torch.no_grad(), autocast_off, modes_off:
        yield


def measured_grids(axes: Axes, column: Callable[[int, int], Timing]) -> tuple[Grid, Grid]:
    """The two times of each cell, as two grids. column(K, N) gives them for an M. Where there are
    more than LARGEST multiply-adds, each further row takes as long as between the two M before."""
    cells: dict[tuple[int, ...], list[float]] = {}
    for k, n in SWEEPS * tuple(product(*axes[1:])):
        timed = column(k, n)
        for m in axes[0]:
            if m in axes[0][:2] or m * k * n <= LARGEST:
                times = timed(m)
                cells[m, k, n] = list(map(min, times, cells.get((m, k, n), times)))

    def seconds(m: int, k: int, n: int, i: int) -> float:
        *_, low, high = (rows for rows in axes[0] if (rows, k, n) in cells)
        if m <= high:
            return cells[m, k, n][i]
        more = max(cells[high, k, n][i] - cells[low, k, n][i], 0.0)
        return cells[high, k, n][i] + more * (m - high) / (high - low)

    ms, ks, ns = axes
    float_s, int8_s = (
        tuple(tuple(tuple(seconds(m, k, n, i) for n in ns) for k in ks) for m in ms)
        for i in range(2)
    )
    return float_s, int8_s


def random(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Of large matrices, the same numbers again and again."""
    generator = torch.Generator().manual_seed(0)  # the user's random state is left alone
    numbers = torch.randn(min(rows * columns, 2**18), generator=generator).to(dtype)
    return numbers.repeat(-(-rows * columns // len(numbers)))[: rows * columns].view(rows, columns)


def interpolate(grid: Grid, axes: Axes, at: tuple[float, float, float]) -> float:
    places = [_between(points, max(size, 1)) for points, size in zip(axes, at, strict=True)]
    seconds = 0.0
    for corner in product((0, 1), repeat=3):
        m, k, n = (i + step for (i, _), step in zip(places, corner, strict=True))
        share = math.prod(t if step else 1 - t for (_, t), step in zip(places, corner, strict=True))
        seconds += share * grid[m][k][n]
    overhead = min(grid[0][0])  # a call never takes less than the smallest one measured
    return max(seconds, overhead)


def interpolate_logs(grid: Grid, axes: Axes, at: tuple[int, int, int]) -> float:
    places = [between_logs(points, max(size, 1)) for points, size in zip(axes, at, strict=True)]
    log_per_mac = 0.0
    for corner in product((0, 1), repeat=3):
        m, k, n = (i + step for (i, _), step in zip(places, corner, strict=True))
        macs = axes[0][m] * axes[1][k] * axes[2][n]
        share = math.prod(t if step else 1 - t for (_, t), step in zip(places, corner, strict=True))
        log_per_mac += share * math.log(grid[m][k][n] / macs)
    overhead = min(grid[0][0])
    return max(math.exp(log_per_mac) * math.prod(max(size, 1) for size in at), overhead)


def between_logs(points: Sequence[float], at: float) -> tuple[int, float]:
    """(i, t): log(at) lies at fraction t, 0 to 1, of the way from log(points[i]) to the next."""
    i, t = _between(tuple(map(math.log, points)), math.log(at))
    return i, min(max(t, 0.0), 1.0)


def _between(points: Sequence[float], at: float) -> tuple[int, float]:
    """(i, t): `at` lies at fraction t of the way from point i to i + 1; t < 0 or t > 1 outside."""
    i = min(max(bisect_right(points, at) - 1, 0), len(points) - 2)
    return i, (at - points[i]) / (points[i + 1] - points[i])
