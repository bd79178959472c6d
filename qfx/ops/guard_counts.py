"""Counts of the guard: how often rows of activations ran in float because their error bound (B5)
was too large."""

from __future__ import annotations

from typing import NamedTuple

import qfx._C as _C


class Guard(NamedTuple):
    """The guard of one matmul. `limit`: rows of x with a larger relative error bound run in float.
    `site`: the name under which calls and rows are counted."""

    limit: float
    site: str


class GuardCount(NamedTuple):
    """The counts of the guard of one matmul: all calls and rows, and those that ran in float.

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
    """Returns the counts of the guarded matmul called `site`, and resets them."""
    return GuardCount(*_C.take_guard_counts(site))
