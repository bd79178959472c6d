"""Choose: picks one candidate (a way to quantize) for each group of matmuls with one input. The
result is the cheapest choice found whose error meets the goal.

The errors of matmuls are noise powers relative to their signals, and the error of the model is
taken as their sum. Matmuls are therefore independent and a choice is a knapsack problem, which is
solved greedily by the gain per added error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from qfx.calibration.search import Candidate

Choice = tuple[int, ...]  # for each group, the index of its candidate


def by_error(groups: Sequence[Sequence[Candidate]], loss_db: float) -> Choice:
    """Returns the fastest choice found whose total error is at most `loss_db` dB above the least
    one.

    Float is not a candidate for groups that have an int8 candidate.
    """
    usable = [[c for c in group if c.scheme is not None] or list(group) for group in groups]
    best = [min(group, key=lambda c: (c.error, c.seconds)) for group in usable]
    budget = sum(c.error for c in best) * (10 ** (loss_db / 10) - 1)
    chosen = list(best)
    for index, candidate in _swaps(usable, best):
        extra = candidate.error - chosen[index].error
        if candidate.seconds < chosen[index].seconds and extra <= budget:
            budget -= extra
            chosen[index] = candidate
    return tuple(group.index(c) for group, c in zip(groups, chosen, strict=True))


def _swaps(
    groups: Sequence[Sequence[Candidate]], best: Sequence[Candidate]
) -> list[tuple[int, Candidate]]:
    """Returns pairs (group, faster candidate), the most time saved per added error first."""

    def worth(swap: tuple[int, Candidate]) -> float:
        index, candidate = swap
        saved = best[index].seconds - candidate.seconds
        return saved / max(candidate.error - best[index].error, 1e-30)

    faster = ((i, c) for i, g in enumerate(groups) for c in g if c.seconds < best[i].seconds)
    return sorted(faster, key=worth, reverse=True)


def by_metric(
    groups: Sequence[Sequence[Candidate]], drop: Callable[[Choice], float], allowed: float
) -> Choice:
    """Returns the choice nearest to the fastest one for which `drop(choice)` is at most `allowed`.

    Steps away from the fastest choice are taken in the order of sensitivity: first the groups whose
    error falls most become as accurate as int8 can be, then those with the largest remaining error
    become float. The number of steps is found by bisection, so `drop` is called about log2(2
    groups) times.
    """
    choices = _ladder(groups)
    if drop(choices[0]) <= allowed:
        return choices[0]
    low, high = 0, len(choices) - 1  # choices[low] drops too much; the last is the model in float
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if drop(choices[middle]) <= allowed else (middle, high)
    return choices[high]


def _ladder(groups: Sequence[Sequence[Candidate]]) -> list[Choice]:
    fastest = [min(range(len(g)), key=lambda i: g[i].seconds) for g in groups]
    accurate = [
        min((i for i in range(len(g)) if g[i].scheme), key=lambda i: g[i].error, default=f)
        for g, f in zip(groups, fastest, strict=True)
    ]
    in_float = [
        next((i for i in range(len(g)) if g[i].scheme is None), a)
        for g, a in zip(groups, accurate, strict=True)
    ]
    choices, now = [tuple(fastest)], list(fastest)
    for levels in (accurate, in_float):
        falls = [g[n].error - g[to].error for g, n, to in zip(groups, now, levels, strict=True)]
        for index in sorted(range(len(groups)), key=falls.__getitem__, reverse=True):
            if now[index] != levels[index]:
                now[index] = levels[index]
                choices.append(tuple(now))
    return choices
