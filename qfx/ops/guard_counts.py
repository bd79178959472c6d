"""Counts of the guard: how often rows ran in float because their error bound was too large. (B5)"""

from __future__ import annotations

from typing import NamedTuple

import qfx._C as _C


class Guard(NamedTuple):
    """The largest relative error bound of rows in int8, and the name under which calls are
    counted."""

    limit: float
    site: str


class GuardCount(NamedTuple):
    """The counts of the guard of a site: all calls and rows, and those that ran in float.

    `float_calls`: calls with at least one row in float. `float_rows`: rows in float.
    """

    calls: int
    rows: int
    float_calls: int
    float_rows: int


def guard_counts() -> dict[str, GuardCount]:
    """Returns the counts of each guarded matmul that ran, by its module path, since the process
    began.

        for site, count in qfx.guard_counts().items():
            print(site, count.float_rows / count.rows)

    Calls of one module are counted together. The result is empty without the option `guard`.
    """
    return {site: GuardCount(*counts) for site, counts in _C.guard_counts().items()}


def taken(site: str) -> GuardCount:
    """Returns the counts of one site and resets them."""
    return GuardCount(*_C.take_guard_counts(site))
