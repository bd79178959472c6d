"""LiveTable: the cost table of one kind of work, whose cells are measured when they are first read.

A prediction reads the points of the grids around a size. Points that no process on this machine has
measured are timed then, as long as `SPENDING.left` is true, and stored on disk. A point whose two
times were far apart is timed again by later processes, TRIES times in all, and the least times are
stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from threading import RLock
from typing import Any, NamedTuple

import torch

from qfx.cost.grid import Axes, Grid, Interpolated, Point
from qfx.cost.grid_timing import LARGEST, undisturbed
from qfx.cost.spending import SPENDING, Spending, limited
from qfx.cost.table import GRIDS, NEAR, Table, Times
from qfx.cost.workloads import Workload

TRIES = 3
DOUBTFUL = 1.0  # a spread above which defaults are followed until the cell is measured again
Sizes = tuple[int, int, int]  # M, K and N of a cell
_MEASURING = RLock()  # of this process: times that threads measure concurrently are meaningless


class Unmeasured(Exception):
    """Raised if a cell that nobody has measured is read and the time for measuring is spent."""


class CellTimes(NamedTuple):
    """The seconds of a cell (one M, K and N) in float and in int8. Each was timed twice. `spread`:
    the fraction by which the longer of the two times exceeded the shorter one. `tries`: how many
    processes have measured the cell."""

    float_s: float
    int8_s: float
    spread: float = 0.0
    tries: int = TRIES

    @property
    def settled(self) -> bool:
        return self.spread <= NEAR or self.tries >= TRIES

    def better(self, other: CellTimes) -> CellTimes:
        """Returns the lesser of the times of both cells, counting one more try."""
        least = min(self.float_s, other.float_s), min(self.int8_s, other.int8_s)
        return CellTimes(*least, min(self.spread, other.spread), min(self.tries + 1, TRIES))


@dataclass
class Known:
    """The measured content of a table: cells by their sizes M, K and N, and numbers by name."""

    cells: dict[Sizes, CellTimes] = field(default_factory=dict)
    numbers: dict[str, tuple[float, ...]] = field(default_factory=dict)


class LiveTable(Times):
    """A table that reads like a `Table` and measures on demand. `workload`: what is timed.
    `changed`: whether cells were measured that were not in `known`. Reading raises Unmeasured if a
    cell has to be measured and `spending` leaves no time."""

    def __init__(
        self,
        workload: Workload,
        dtype: torch.dtype,
        known: Known | None = None,
        spending: Spending = SPENDING,
    ) -> None:
        self.workload, self.dtype, self.spending = workload, dtype, spending
        self.known, self.changed = known or Known(), False
        self._requested: set[Sizes] = (
            set()
        )  # requested in this process: none is measured twice in it
        self.grids: Mapping[str, Interpolated] = {
            name: _LiveGrid(self, i) for i, name in enumerate(GRIDS)
        }
        self.numbers: Mapping[str, tuple[float, ...]] = _Numbers(self)

    def whole(self) -> Table:
        """Returns the whole table as a `Table`, after measuring whatever is missing."""
        points = [*product(*(range(len(p)) for p in self.workload.axes))]
        self.measure(points)
        grids = {name: Grid(self.workload.axes, _nested(g)) for name, g in self.grids.items()}
        return Table(grids, {name: self.numbers[name] for name in self.workload.extras})

    def cell(self, point: Point) -> CellTimes:
        """Returns the seconds at one point of the axes. The seconds of matmuls with more than
        LARGEST multiply-adds are not measured but extrapolated, from the two largest M of the axis
        that are measured for this K and N."""
        rows, *_ = self.workload.axes
        if self._is_timed(point):
            return self.known.cells[self._sizes(point)]
        high = max(i for i in range(len(rows)) if self._is_timed((i, *point[1:])))
        low, last = (self.cell((i, *point[1:])) for i in (high - 1, high))
        further = (rows[point[0]] - rows[high]) / (rows[high] - rows[high - 1])
        float_s = last.float_s + max(last.float_s - low.float_s, 0.0) * further
        return CellTimes(float_s, last.int8_s + max(last.int8_s - low.int8_s, 0.0) * further)

    def measure(self, points: Sequence[Point]) -> None:
        """Times the unknown cells that these points need, for each K and N in turn. Raises
        Unmeasured if there is no time left, or if times are too doubtful to be used."""
        wanted = {p for point in points for p in self._timed_for(point)}
        columns: dict[tuple[int, int], list[int]] = {}
        with _MEASURING:
            for m, k, n in sorted(map(self._sizes, wanted)):
                if self._lacks((m, k, n)):
                    columns.setdefault((k, n), []).append(m)
            if columns:
                with self._timing():
                    for (k, n), rows in columns.items():
                        self._check_time()
                        self._measure_column(k, n, rows)
        if limited() and any(self._is_doubtful(point) for point in wanted):
            raise Unmeasured

    def number(self, name: str) -> tuple[float, ...]:
        """Returns the extra numbers called `name` (those of `Workload.extras`, such as
        corrections), after measuring them if they are unknown."""
        with _MEASURING:
            if name not in self.known.numbers:
                self._check_time()
                with self._timing():
                    measured = self.workload.extras[name].measured(self.dtype)
                    self.known.numbers[name] = tuple(measured)
            return self.known.numbers[name]

    def _measure_column(self, k: int, n: int, rows: Sequence[int]) -> None:
        timing = self.workload.column(k, n, self.dtype)

        def timed(m: int) -> Sequence[float]:
            self._check_time()
            return timing(m)

        first = {m: timed(m) for m in rows}
        for m in rows:
            (float_s, int8_s), (float_again_s, int8_again_s) = first[m], timed(m)
            spread = max(_apart(float_s, float_again_s), _apart(int8_s, int8_again_s))
            found = CellTimes(min(float_s, float_again_s), min(int8_s, int8_again_s), spread, 1)
            known = self.known.cells.get((m, k, n))
            self.known.cells[m, k, n] = found if known is None else known.better(found)

    def _lacks(self, sizes: Sizes) -> bool:
        """Whether to measure a cell: it is unknown, or its times have not settled and this process
        has not measured it yet."""
        known = self.known.cells.get(sizes)
        if known is not None and (
            known.settled or sizes in self._requested or not self.spending.left
        ):
            return False
        self._requested.add(sizes)
        return True

    def _check_time(self) -> None:
        if not self.spending.left:
            raise Unmeasured

    @contextmanager
    def _timing(self) -> Iterator[None]:
        self.changed = True
        with undisturbed(), self.spending.counted():
            yield

    def _is_doubtful(self, point: Point) -> bool:
        """Whether the two times of a cell differ so much that they say nothing, as on a machine
        that other work keeps busy."""
        return self.known.cells[self._sizes(point)].spread > DOUBTFUL

    def _is_timed(self, point: Point) -> bool:
        m, k, n = self._sizes(point)
        return point[0] < 2 or m * k * n <= LARGEST

    def _timed_for(self, point: Point) -> Iterator[Point]:
        if self._is_timed(point):
            yield point
            return
        timed = [i for i in range(point[0]) if self._is_timed((i, *point[1:]))]
        yield from ((i, *point[1:]) for i in timed[-2:])

    def _sizes(self, point: Point) -> Sizes:
        m, k, n = (points[i] for points, i in zip(self.workload.axes, point, strict=True))
        return m, k, n


class _LiveGrid(Interpolated):
    """The times in float, or those in int8, of a live table."""

    def __init__(self, table: LiveTable, which: int) -> None:
        self.axes: Axes = table.workload.axes
        self._table, self._which = table, which

    def ask(self, points: Sequence[Point]) -> None:
        self._table.measure([(0,) * len(self.axes), *points])

    def at(self, indices: Sequence[int]) -> float:
        return self._table.cell(tuple(indices))[self._which]


class _Numbers(Mapping[str, tuple[float, ...]]):
    """The numbers of a live table, by name."""

    def __init__(self, table: LiveTable) -> None:
        self._table = table

    def __getitem__(self, name: str) -> tuple[float, ...]:
        return self._table.number(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.workload.extras)

    def __len__(self) -> int:
        return len(self._table.workload.extras)


def _apart(a: float, b: float) -> float:
    return max(a, b) / min(a, b) - 1


def _nested(grid: Interpolated) -> Any:
    def of(indices: Point) -> Any:
        if len(indices) == len(grid.axes):
            return grid.at(indices)
        return [of((*indices, i)) for i in range(len(grid.axes[len(indices)]))]

    return of(())
