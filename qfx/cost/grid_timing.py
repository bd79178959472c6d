"""Measuring grids: every cell in two sweeps, out of the caller's modes, on numbers made for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch

from qfx.cost.grid import Axes, Check, Grid, seconds
from qfx.host.tensors import without_modes

Timing = Callable[[int], Sequence[float]]  # M -> seconds in float and in int8
Column = Callable[[int, int, torch.dtype], Timing]  # of K and N
LARGEST = 2**28  # multiply-adds of a cell that is timed
SWEEPS = 2  # over a grid, the lesser time counting: what disturbs often lasts for many cells
ROUNDS = 2  # of a cell in each
FAR = 64 << 20  # bytes that no cache near the processor holds
MATRICES = 128  # as many weights as a model has between two uses of one


class Extra(NamedTuple):
    """Numbers beside the grids: how they are measured, how many they are, and what each may be."""

    measured: Callable[[torch.dtype], Iterable[float]]
    size: int
    check: Check = seconds


@contextmanager
def undisturbed() -> Iterator[None]:
    """Neither gradients nor the caller's autocast nor a mode such as Dynamo's. Nor inference mode,
    in which operators skip the dispatch to their gradients that compiled graphs go through."""
    modes_off = without_modes()
    autocast_off = torch.autocast("cpu", enabled=False)
    with torch.inference_mode(False), torch.no_grad(), autocast_off, modes_off:
        try:
            yield
        finally:
            _room.cache_clear()


def measured_grids(axes: Axes, column: Column, dtype: torch.dtype) -> tuple[Grid, Grid, float]:
    """The two times of each cell, as two grids, and how far sweeps were apart. Where there are more
    than LARGEST multiply-adds, each further row takes as long as between the two M before."""
    cells: dict[tuple[int, ...], list[float]] = {}
    apart: list[float] = []
    for k, n in SWEEPS * tuple(product(*axes[1:])):
        timed = column(k, n, dtype)
        for m in axes[0]:
            if m in axes[0][:2] or m * k * n <= LARGEST:
                times = timed(m)
                before = cells.get((m, k, n), times)
                apart += [max(t, b) / min(t, b) - 1 for t, b in zip(times, before, strict=True)]
                cells[m, k, n] = list(map(min, times, before))

    def seconds(m: int, k: int, n: int, i: int) -> float:
        *_, low, high = (rows for rows in axes[0] if (rows, k, n) in cells)
        if m <= high:
            return cells[m, k, n][i]
        more = max(cells[high, k, n][i] - cells[low, k, n][i], 0.0)
        return cells[high, k, n][i] + more * (m - high) / (high - low)

    ms, ks, ns = axes
    both = ([[[seconds(m, k, n, i) for n in ns] for k in ks] for m in ms] for i in range(2))
    float_s, int8_s = (Grid(axes, times) for times in both)
    return float_s, int8_s, spread(apart[len(apart) // 2 :])


def spread(apart: Sequence[float]) -> float:
    """What three quarters of the cells do not exceed: of a quarter that a sweep disturbs, a quarter
    is disturbed in the other one too, where the least time no longer helps."""
    return sorted(apart)[len(apart) * 3 // 4]


@lru_cache(maxsize=2)
def _room(dtype: torch.dtype) -> torch.Tensor:
    """Memory of FAR bytes: numbers for floats, anything for codes. `undisturbed` gives it back."""
    count = FAR // dtype.itemsize
    return (
        random(1, count, dtype).view(-1)
        if dtype.is_floating_point
        else torch.empty(count, dtype=dtype, device="cpu")
    )


def _in_turn(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Places [matrices, count] to be used in turn, so that each comes from where a model's weights
    come from: from memory where they are large, from a cache where all of a model's fit in it."""
    room = _room(dtype)
    matrices = min(max(room.numel() // max(count, 1), 1), MATRICES)
    if matrices * count > room.numel():
        return random(1, count, dtype) if dtype.is_floating_point else room.new_empty(1, count)
    return room[: matrices * count].view(matrices, count)


def weights(n: int, k: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Matrices [n, k]."""
    return list(_in_turn(n * k, dtype).view(-1, n, k))


def apart(codes: torch.Tensor) -> list[torch.Tensor]:
    """Copies of a packed weight."""
    return list(_in_turn(codes.numel(), codes.dtype).copy_(codes))


def random(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Of large matrices, the same numbers again and again."""
    generator = torch.Generator().manual_seed(0)  # the user's random state is left alone
    count = min(rows * columns, 2**18)
    numbers = torch.randn(count, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
    return numbers.repeat(-(-rows * columns // len(numbers)))[: rows * columns].view(rows, columns)
