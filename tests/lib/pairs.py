"""Small selections of test cases that cover every pair of properties of all cases.

Defects depend on one or two properties far more often than on three. So the usual profile runs
cases that cover all pairs, and the long profile, `QFX_TEST_PROFILE=long`, runs whole products.
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
    """Returns tuples with one value of each axis. Every two values of two axes are together in one
    of the tuples, so that two axes are crossed. In the long profile, all tuples."""
    lists = [list(axis) for axis in axes]
    chosen = covering(list(product(*map(range, map(len, lists)))), places)
    return [tuple(axis[i] for axis, i in zip(lists, each, strict=True)) for each in chosen]


def every(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Returns as many tuples as the longest axis has values; shorter axes repeat theirs. For axes
    that do not interact. In the long profile, all tuples."""
    lists = [list(axis) for axis in axes]
    if LONG:
        return list(product(*lists))
    longest = max(map(len, lists))
    return [tuple(axis[i % len(axis)] for axis in lists) for i in range(longest)]


def usual(few: Iterable[Any], everything: Iterable[Any]) -> list[Any]:
    """Returns `few`, which stand for the rest; in the long profile, everything."""
    return list(everything if LONG else few)


def places(case: Iterable[Hashable]) -> list[Hashable]:
    """Returns all pairs of values with their positions."""
    return list(combinations(enumerate(case), 2))


def values(case: Any) -> dict[str, Hashable]:
    """Returns the fields of a dataclass, and those of dataclasses inside it, by dotted names."""
    found: dict[str, Hashable] = {}
    for field in fields(case):
        value = getattr(case, field.name)
        if is_dataclass(value):
            found |= {f"{field.name}.{name}": each for name, each in values(value).items()}
        else:
            found[field.name] = value
    return found


def properties(case: Any) -> list[Hashable]:
    """Returns the pairs of field name and value."""
    return list(values(case).items())


def covering(cases: Sequence[Case], found_in: Callable[[Case], Iterable[Hashable]]) -> list[Case]:
    """Returns some of the cases, in their order, that contain whatever `found_in` finds in any of
    them. Each step takes a case with the most that is new. In the long profile, all cases."""
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
