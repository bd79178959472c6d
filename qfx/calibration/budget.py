"""Budget: one candidate for each group, fast, their predicted divergences together within a budget.

Divergences add up over sites, so the choice is a knapsack. It is filled by time saved per
divergence, along each group's lower convex hull of time over divergence. A step that does not fit
ends that, so choices are also made without the candidates of much divergence; the fastest of those
that fit is taken. Which choices there are does not depend on the budget: a larger one is never
slower.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from qfx.calibration.choose import Choice
from qfx.calibration.search import Candidate

Group = Sequence[Candidate]


class _Step(NamedTuple):
    """From one candidate of a group to a faster one."""

    group: int
    to: int
    seconds: float  # saved
    divergence: float  # added

    @property
    def worth(self) -> float:
        return self.seconds / self.divergence if self.divergence > 0 else float("inf")


def by_divergence(groups: Sequence[Group], budget: float) -> Choice:
    """The fastest choice found whose divergences add up to at most `budget`.

    Where even the most accurate candidates have more than that, these.
    """
    limits = sorted({c.divergence for group in groups for c in group})
    start = tuple(_most_accurate(group) for group in groups)
    best, least = start, _seconds(groups, start)
    for limit in limits:
        choice = list(start)
        spent = sum(g[i].divergence for g, i in zip(groups, start, strict=True))
        for step in _steps(groups, limit):
            spent += step.divergence
            if not spent <= budget or spent == math.inf:
                break
            choice[step.group] = step.to
        seconds = _seconds(groups, choice)
        if seconds < least:
            best, least = tuple(choice), seconds
    return best


def _steps(groups: Sequence[Group], limit: float) -> list[_Step]:
    """All steps between candidates of at most this divergence, the most worth first."""
    found = [s for i, group in enumerate(groups) for s in _hull(i, group, limit)]
    return sorted(found, key=lambda step: step.worth, reverse=True)  # stable: in order of a group


def _hull(index: int, group: Group, limit: float) -> Iterator[_Step]:
    """From the most accurate candidate to the fastest, each step worth less than the one before."""
    now, usable = _most_accurate(group), [i for i, c in enumerate(group) if c.divergence <= limit]
    while True:
        here = group[now]
        faster = [i for i in usable if group[i].seconds < here.seconds]
        steps = [
            _Step(index, i, here.seconds - group[i].seconds, group[i].divergence - here.divergence)
            for i in faster
        ]
        if not steps:
            return
        step = max(steps, key=lambda step: (step.worth, step.seconds))
        yield step
        now = step.to


def _most_accurate(group: Group) -> int:
    return min(range(len(group)), key=lambda i: (group[i].divergence, group[i].seconds))


def _seconds(groups: Sequence[Group], choice: Sequence[int]) -> float:
    return sum(group[i].seconds for group, i in zip(groups, choice, strict=True))
