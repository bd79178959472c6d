"""Guard: how often rows ran in float because their error bound was too great. (B5)"""

from __future__ import annotations

from typing import NamedTuple

import qfx._C as _C


class Guard(NamedTuple):
    """The greatest relative error bound of rows in int8, and the name that calls count under."""

    limit: float
    site: str


class GuardCount(NamedTuple):
    """What the guard of a site has seen: calls and rows, and which of them ran in float.

    `float_calls`: calls with at least one row in float; `float_rows`: such rows.
    """

    calls: int
    rows: int
    float_calls: int
    float_rows: int


def guard_counts() -> dict[str, GuardCount]:
    """For each guarded matmul that ran, by its module path, its counts since the process began.

    Calls of one module count together. Empty without the option `guard`.
    """
    return {site: GuardCount(*counts) for site, counts in _C.guard_counts().items()}


def taken(site: str) -> GuardCount:
    """The counts of one site, which are forgotten."""
    return GuardCount(*_C.take_guard_counts(site))
