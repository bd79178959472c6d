"""Few cases in the place of all: every two properties that occur together do so in one of them.

Defects depend on one property or on two far more often than on three, so that products of axes are
the long profile's, `QFX_TEST_PROFILE=long`, and what covers their pairs is everyone's.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from itertools import combinations, product
from typing import Any, TypeVar

LONG = os.environ.get("QFX_TEST_PROFILE") == "long"
Case = TypeVar("Case")


def pairs(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Tuples of a value of each axis, every two values of two axes in one of them; two axes are
    crossed. In the long profile all tuples."""
    lists = [list(axis) for axis in axes]
    chosen = covering(list(product(*map(range, map(len, lists)))), places)
    return [tuple(axis[i] for axis, i in zip(lists, each, strict=True)) for each in chosen]


def every(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """As many tuples as the longest axis has values, each axis going round: for axes that have
    nothing to do with one another. In the long profile all tuples."""
    lists = [list(axis) for axis in axes]
    if LONG:
        return list(product(*lists))
    longest = max(map(len, lists))
    return [tuple(axis[i % len(axis)] for axis in lists) for i in range(longest)]


def places(case: Iterable[Hashable]) -> list[Hashable]:
    """Every two values with the places where they stand."""
    return list(combinations(enumerate(case), 2))


def values(case: Any) -> dict[str, Hashable]:
    """Those of a dataclass's fields, and of dataclasses inside it."""
    found: dict[str, Hashable] = {}
    for field in fields(case):
        value = getattr(case, field.name)
        if is_dataclass(value):
            found |= {f"{field.name}.{name}": each for name, each in values(value).items()}
        else:
            found[field.name] = value
    return found


def properties(case: Any) -> list[Hashable]:
    """The names of its fields with their values."""
    return list(values(case).items())


def covering(cases: Sequence[Case], found_in: Callable[[Case], Iterable[Hashable]]) -> list[Case]:
    """Those in which all is found that is found in any of them, in their order: at each step one
    more, of those with the most that is new. In the long profile all of them."""
    if LONG:
        return list(cases)
    each = [set(found_in(case)) for case in cases]
    queue = [(-len(found), i) for i, found in enumerate(each)]
    heapq.heapify(queue)
    seen: set[Hashable] = set()
    chosen: list[int] = []
    while queue:
        _, i = heapq.heappop(queue)
        new = len(each[i] - seen)
        if new and queue and new < -queue[0][0]:
            heapq.heappush(queue, (-new, i))
        elif new:
            seen |= each[i]
            chosen.append(i)
    return [cases[i] for i in sorted(chosen)]
