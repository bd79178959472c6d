"""Grid: seconds by sizes, and what they say of sizes between and beyond them.

Two ways, for any number of axes. Linear: a call takes a fixed time, and some for each row, column,
feature, and product of these, so between neighbouring points the time is linear in each size, and
beyond the last two it goes on so. Logs: the logarithm of the time for each unit of work is linear
in those of the sizes, and beyond the last point it stays as it is: better on sparse grids.
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

LONGEST = 3600.0  # seconds that anything measured may have taken
Axes = tuple[tuple[int, ...], ...]
Point = tuple[int, ...]  # indices of the axes
Check = Callable[[Any], float]  # the number, or ValueError


class Interpolated:
    """Seconds of any sizes, from those of the points of `axes`, which a subclass knows."""

    axes: Axes

    def at(self, indices: Sequence[int]) -> float:
        """Seconds at one point."""
        raise NotImplementedError

    def linear(self, *sizes: float) -> float:
        """Seconds for these sizes; never less than the smallest call."""
        places = [_between(p, max(size, 1)) for p, size in zip(self.axes, sizes, strict=True)]
        self.ask(_corners(places))
        return max(_mixed(places, self.at), self.smallest)

    def logs(self, *sizes: int) -> float:
        """Seconds for these sizes; never less than the least of all points."""
        wanted = [max(size, 1) for size in sizes]
        places = [_between_logs(p, size) for p, size in zip(self.axes, wanted, strict=True)]
        self.ask(_corners(places))
        per_unit = _mixed(places, lambda at: math.log(self.at(at) / self._work(at)))
        return max(math.exp(per_unit) * math.prod(wanted), self.least)

    def ask(self, points: Sequence[Point]) -> None:
        """Announces which points will be read, before the first of them is."""

    def within(self, *sizes: int) -> tuple[int, ...]:
        """The sizes, those below the axes' smallest as that one: vectors are not shorter."""
        return tuple(max(size, p[0]) for p, size in zip(self.axes, sizes, strict=True))

    @property
    def smallest(self) -> float:
        """Seconds where all sizes are the smallest."""
        return self.at((0,) * len(self.axes))

    @property
    def least(self) -> float:
        """Seconds that no call falls below."""
        return self.smallest

    def _work(self, indices: Sequence[int]) -> int:
        return math.prod(points[i] for points, i in zip(self.axes, indices, strict=True))


@dataclass(frozen=True)
class Grid(Interpolated):
    """Seconds on the points of `axes`: nested tuples, as deep as there are axes.

    Lists become tuples. ValueError for axes that do not ascend, another shape, and what is no time.
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
        """Seconds where all sizes but the last are the smallest."""
        first: Any = reduce(getitem, (0,) * (len(self.axes) - 1), self.seconds)
        return float(min(first))

    @cached_property
    def least(self) -> float:  # type: ignore[override]
        """The least of all points."""
        return min(map(self.at, product(*(range(len(points)) for points in self.axes))))


Place = tuple[int, float]  # (i, t): at fraction t of the way from point i to i + 1


def _corners(places: Sequence[Place]) -> list[Point]:
    """The points around a place that count there."""
    return [*product(*([i + j for j, share in ((0, 1 - t), (1, t)) if share] for i, t in places))]


def _mixed(places: Sequence[Place], value: Callable[[Sequence[int]], float]) -> float:
    """The values of the corners around a place, each by its nearness."""
    total = 0.0
    for indices in _corners(places):
        share = math.prod(
            t if i > first else 1 - t for i, (first, t) in zip(indices, places, strict=True)
        )
        total += share * value(indices)
    return total


def _between(points: Sequence[float], at: float) -> Place:
    """t < 0 or t > 1 outside of the points."""
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
    """Nested lists as long as `sizes` say, as tuples of what `leaf` makes; else ValueError."""
    if not sizes:
        return leaf(raw)
    if not isinstance(raw, list | tuple) or len(raw) != sizes[0]:
        raise ValueError(f"a table has no list of {sizes[0]} where one belongs")
    return tuple(nested(inner, sizes[1:], leaf) for inner in raw)


def seconds(raw: Any, least: float = 0.0, most: float = LONGEST) -> float:
    """A number from `least` to `most`; ValueError for anything else, NaN among it."""
    if type(raw) not in (int, float) or not least <= raw <= most:
        raise ValueError(f"a table holds {str(raw)[:40]}, which is not from {least} to {most}")
    return float(raw)


def positive(raw: Any) -> float:
    """Seconds above 0."""
    return seconds(raw, least=2.0**-1022)


def count(raw: Any) -> float:
    """A number of columns or matrices."""
    return seconds(raw, most=1e9)
