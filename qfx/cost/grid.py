"""Grid: seconds measured at some sizes, and interpolation for sizes between and beyond these.

There are two interpolations, for any number of axes. `linear`: a call takes a fixed time, plus time
for each row, column, feature, and product of these; so between neighbouring points the time is
linear in each size, and it is extrapolated beyond the last two points. `logs`: the logarithm of the
time per unit of work is linear in the logarithms of the sizes, and constant beyond the last point;
this is better on sparse grids.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import product
from operator import getitem
from typing import Any

LONGEST = 3600.0  # the longest time, in seconds, that a table may hold
Axes = tuple[tuple[int, ...], ...]
Point = tuple[int, ...]  # an index into each axis
Check = Callable[[Any], float]  # returns the number or raises ValueError


class Interpolated:
    """Seconds for any sizes, interpolated from the points of `axes`, which a subclass provides."""

    axes: Axes

    def at(self, indices: Sequence[int]) -> float:
        """Returns the seconds at one point."""
        raise NotImplementedError

    def linear(self, *sizes: float) -> float:
        """Returns the seconds for these sizes by `linear` interpolation; never less than
        `smallest`."""
        places = [_between(p, max(size, 1)) for p, size in zip(self.axes, sizes, strict=True)]
        self.ask(_corners(places))
        return max(_mixed(places, self.at), self.smallest)

    def logs(self, *sizes: int) -> float:
        """Returns the seconds for these sizes by `logs` interpolation; never less than `least`."""
        wanted = [max(size, 1) for size in sizes]
        places = [_between_logs(p, size) for p, size in zip(self.axes, wanted, strict=True)]
        self.ask(_corners(places))
        per_unit = _mixed(places, lambda at: math.log(self.at(at) / self._work(at)))
        return max(math.exp(per_unit) * math.prod(wanted), self.least)

    def ask(self, points: Sequence[Point]) -> None:
        """Announces the points whose seconds `at` will be asked for, so that a subclass can measure
        them together."""

    def within(self, *sizes: int) -> tuple[int, ...]:
        """Returns the sizes; a size below the first point of its axis becomes that point, because a
        kernel's vectors are not shorter."""
        return tuple(max(size, p[0]) for p, size in zip(self.axes, sizes, strict=True))

    @property
    def smallest(self) -> float:
        """The seconds at the point where all sizes are the smallest."""
        return self.at((0,) * len(self.axes))

    @property
    def least(self) -> float:
        """A lower bound on the seconds of a call."""
        return self.smallest

    def _work(self, indices: Sequence[int]) -> int:
        return math.prod(points[i] for points, i in zip(self.axes, indices, strict=True))


@dataclass(frozen=True)
class Grid(Interpolated):
    """Measured seconds at the points of `axes`, as tuples nested as deep as there are axes.

    Lists are converted to tuples. Raises ValueError for axes that do not ascend, for another shape,
    and for values that are not times.
    """

    axes: Axes
    seconds: Any

    def __post_init__(self) -> None:
        axes = tuple(map(_ascending, self.axes))
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "seconds", nested(self.seconds, tuple(map(len, axes)), positive))

    def at(self, indices: Sequence[int]) -> float:
        found: float = reduce(getitem, indices, self.seconds)
        return found

    @cached_property
    def smallest(self) -> float:  # type: ignore[override]
        """The least seconds over the last axis, where all other sizes are the smallest."""
        first: Any = reduce(getitem, (0,) * (len(self.axes) - 1), self.seconds)
        return float(min(first))

    @cached_property
    def least(self) -> float:  # type: ignore[override]
        """The least seconds of all points."""
        return min(map(self.at, product(*(range(len(points)) for points in self.axes))))


Place = tuple[int, float]  # (i, t): at fraction t of the way from point i to i + 1


def _corners(places: Sequence[Place]) -> list[Point]:
    """Returns the grid points around a place that have a nonzero weight in its interpolation."""
    return [*product(*([i + j for j, share in ((0, 1 - t), (1, t)) if share] for i, t in places))]


def _mixed(places: Sequence[Place], value: Callable[[Sequence[int]], float]) -> float:
    """Returns the interpolation of `value` at a place: its values at the grid points around the
    place, weighted by their nearness."""
    total = 0.0
    for indices in _corners(places):
        share = math.prod(
            t if i > first else 1 - t for i, (first, t) in zip(indices, places, strict=True)
        )
        total += share * value(indices)
    return total


def _between(points: Sequence[float], at: float) -> Place:
    """Returns (i, t) of `at` among `points`; t < 0 or t > 1 if it lies outside of them."""
    i = min(max(bisect_right(points, at) - 1, 0), len(points) - 2)
    return i, (at - points[i]) / (points[i + 1] - points[i])


def _between_logs(points: Sequence[float], at: float) -> Place:
    i, t = _between(tuple(map(math.log, points)), math.log(at))
    return i, min(max(t, 0.0), 1.0)


def _ascending(points: Any) -> tuple[int, ...]:
    whole = all(type(p) is int and p >= 1 for p in points)
    if not whole or len(points) < 2 or [*points] != sorted(set(points)):
        raise ValueError(f"a table's axis {points!r} is no list of two or more ascending sizes")
    return tuple(points)


# --- what a table may hold ---


def nested(raw: Any, sizes: Sequence[int], leaf: Callable[[Any], Any]) -> Any:
    """Returns nested lists with lengths `sizes` as nested tuples of `leaf(element)`. Raises
    ValueError for another shape."""
    if not sizes:
        return leaf(raw)
    if not isinstance(raw, list | tuple) or len(raw) != sizes[0]:
        raise ValueError(f"a table has no list of {sizes[0]} where one belongs")
    return tuple(nested(inner, sizes[1:], leaf) for inner in raw)


def seconds(raw: Any, least: float = 0.0, most: float = LONGEST) -> float:
    """Returns the seconds `raw`, a number from `least` to `most`. Raises ValueError for anything
    else, including NaN."""
    if type(raw) not in (int, float) or not least <= raw <= most:
        raise ValueError(f"a table holds {str(raw)[:40]}, which is not from {least} to {most}")
    return float(raw)


def positive(raw: Any) -> float:
    """Returns the seconds `raw`, a number above 0. Raises ValueError for anything else."""
    return seconds(raw, least=2.0**-1022)


def count(raw: Any) -> float:
    """Returns the number of columns or matrices `raw`, from 0 to 1e9. Raises ValueError for
    anything else."""
    return seconds(raw, most=1e9)
