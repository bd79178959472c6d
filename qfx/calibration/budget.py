"""Budget: one candidate for each group, what they spend together within a budget, and good.

What is spent adds up over sites, so the choice is a knapsack. It is filled by what is saved for
what is spent, along each group's lower convex hull. A step that does not fit ends that, so choices
are also made without the candidates that spend much; the best of those that fit is taken. Which
choices there are does not depend on the budget: of a larger one the choice is never worse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from qfx.calibration.choose import Choice
from qfx.calibration.search import Candidate

Group = Sequence[Candidate]


class Terms(NamedTuple):
    """What a candidate spends of a budget, and what of it is to be as little as possible."""

    spent: Callable[[Candidate], float]
    least: Callable[[Candidate], float]


class _Upgrade(NamedTuple):
    """From one candidate of a group to one that is better and spends more."""

    group: int
    to: int
    saved: float
    spent: float

    @property
    def worth(self) -> float:
        return self.saved / self.spent if self.spent > 0 else float("inf")


def by_divergence(groups: Sequence[Group], budget: float) -> Choice:
    """The fastest choice found whose divergences add up to at most `budget`."""
    return within(groups, budget, Terms(lambda c: c.divergence, lambda c: c.seconds))


def by_bytes(groups: Sequence[Group], budget: float) -> Choice:
    """The choice found of the least divergence whose weights take at most `budget` bytes.

    Where divergences are not known they are infinite, and the fewest bytes are taken.
    """
    return within(groups, budget, Terms(lambda c: c.bytes, lambda c: min(c.divergence, _UNKNOWN)))


_UNKNOWN = 1e30


def within(groups: Sequence[Group], budget: float, terms: Terms) -> Choice:
    """The best choice found that spends at most `budget`.

    Where even the candidates that spend least have more than that, these.
    """
    limits = sorted({terms.spent(c) for group in groups for c in group})
    start = tuple(_thriftiest(group, terms) for group in groups)
    best, least = start, _sum(groups, start, terms)
    for limit in limits:
        choice = list(start)
        spent = sum(terms.spent(g[i]) for g, i in zip(groups, start, strict=True))
        for step in _steps(groups, limit, terms):
            spent += step.spent
            if not spent <= budget or spent == math.inf:
                break
            choice[step.group] = step.to
        total = _sum(groups, choice, terms)
        if total < least:
            best, least = tuple(choice), total
    return best


def _steps(groups: Sequence[Group], limit: float, terms: Terms) -> list[_Upgrade]:
    """All steps between candidates that spend at most this, the most worth first."""
    found = [s for i, group in enumerate(groups) for s in _hull(i, group, limit, terms)]
    return sorted(found, key=lambda step: step.worth, reverse=True)  # stable: in order of a group


def _hull(index: int, group: Group, limit: float, terms: Terms) -> Iterator[_Upgrade]:
    """From what spends least to what is best, each step worth less than the one before."""
    now, usable = (
        _thriftiest(group, terms),
        [i for i, c in enumerate(group) if terms.spent(c) <= limit],
    )
    while True:
        value, spent = terms.least(group[now]), terms.spent(group[now])
        better = [i for i in usable if terms.least(group[i]) < value]
        steps = [
            _Upgrade(index, i, value - terms.least(group[i]), terms.spent(group[i]) - spent)
            for i in better
        ]
        if not steps:
            return
        step = max(steps, key=lambda step: (step.worth, step.saved))
        yield step
        now = step.to


def _thriftiest(group: Group, terms: Terms) -> int:
    return min(range(len(group)), key=lambda i: (terms.spent(group[i]), terms.least(group[i])))


def _sum(groups: Sequence[Group], choice: Sequence[int], terms: Terms) -> float:
    return sum(terms.least(group[i]) for group, i in zip(groups, choice, strict=True))
