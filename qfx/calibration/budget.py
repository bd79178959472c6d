"""Budget: chooses one candidate (a way to quantize) for each group of matmuls with one input, so
that all together stay within a budget.

Each candidate spends some of the budget (for example bytes), and the spending adds up over groups,
so the choice is a knapsack problem. It is solved greedily. The candidates on the lower convex hull
of a group, from the one that spends least to the best one, give steps: a step replaces a candidate
by the next one. The steps of all groups are sorted by the ratio of what they save to what they
spend, and taken from the largest ratio on. The first step that does not fit ends the search.
Because such a step may be a very expensive one, the search is repeated without the candidates that
spend most, and the best choice that fits is returned. The choices that are tried do not depend on
the budget, so a larger budget never gives a worse choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from qfx.calibration.choose import Choice
from qfx.calibration.search import Candidate

Group = Sequence[Candidate]


class Terms(NamedTuple):
    """Two properties of a candidate: the amount that it spends of the budget, and the quantity to
    minimize."""

    spent: Callable[[Candidate], float]
    least: Callable[[Candidate], float]


class _Upgrade(NamedTuple):
    """A step from one candidate of a group to a better one that spends more."""

    group: int
    to: int
    saved: float
    spent: float

    @property
    def worth(self) -> float:
        return self.saved / self.spent if self.spent > 0 else float("inf")


def by_divergence(groups: Sequence[Group], budget: float) -> Choice:
    """Returns the fastest choice found whose divergences (predicted changes of the model's output)
    add up to at most `budget`."""
    return within(groups, budget, Terms(lambda c: c.divergence, lambda c: c.seconds))


def by_bytes(groups: Sequence[Group], budget: float) -> Choice:
    """Returns the choice found with the least divergence whose weights take at most `budget` bytes.

    Unknown divergences count as infinite; among such candidates the one with the fewest bytes wins.
    """
    return within(groups, budget, Terms(lambda c: c.bytes, lambda c: min(c.divergence, _UNKNOWN)))


_UNKNOWN = 1e30


def within(groups: Sequence[Group], budget: float, terms: Terms) -> Choice:
    """Returns the best choice found that spends at most `budget`.

    If even the candidates that spend least exceed the budget, they are returned.
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
    """Returns the steps of all groups between candidates that spend at most `limit`. Steps with the
    largest ratio of `saved` to `spent` come first."""
    found = [s for i, group in enumerate(groups) for s in _hull(i, group, limit, terms)]
    return sorted(found, key=lambda step: step.worth, reverse=True)  # stable: keeps a group's order


def _hull(index: int, group: Group, limit: float, terms: Terms) -> Iterator[_Upgrade]:
    """Yields a group's steps along its lower convex hull, from the candidate that spends least to
    the best one. The ratio of `saved` to `spent` falls from step to step."""
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
