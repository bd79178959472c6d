"""The choice among candidates: within its goal, and as fast as the goal allows."""

from __future__ import annotations

import itertools
import math

from hypothesis import example, given
from hypothesis import strategies as st

from qfx.calibration.choose import Choice, by_error, by_metric
from qfx.calibration.record import Transform
from qfx.calibration.search import Candidate
from qfx.values.scheme import Scheme

Groups = list[list[Candidate]]


def candidate(error: float, seconds: float, scheme: Scheme | None = None) -> Candidate:
    return Candidate(scheme, Transform(), (error,), seconds)


numbers = st.integers(1, 1000).map(float)
int8 = st.builds(candidate, numbers, numbers, st.just(Scheme()))
in_float = st.builds(candidate, st.just(0.0), numbers)
group = st.tuples(in_float, st.lists(int8, min_size=1, max_size=3)).map(lambda t: [t[0], *t[1]])
groups = st.lists(group, min_size=1, max_size=5)


def total(groups: Groups, choice: Choice) -> tuple[float, float]:
    """(error, seconds)"""
    chosen = [g[i] for g, i in zip(groups, choice, strict=True)]
    return sum(c.error for c in chosen), sum(c.seconds for c in chosen)


def least_error(groups: Groups) -> float:
    return sum(min(c.error for c in g if c.scheme) for g in groups)


_TWO = [candidate(0.0, 9.0), candidate(1.0, 2.0, Scheme()), candidate(1.6, 1.0, Scheme())]


@given(groups, st.floats(0, 20))
@example([_TWO, _TWO], 10 * math.log10(3 / 2))  # either may be the faster one, not both
def test_the_error_stays_within_the_goal(groups: Groups, loss_db: float) -> None:
    choice = by_error(groups, loss_db)
    allowed = least_error(groups) * 10 ** (loss_db / 10)
    assert total(groups, choice)[0] <= allowed * (1 + 1e-12)
    assert all(g[i].scheme for g, i in zip(groups, choice, strict=True))


@given(groups)
def test_no_loss_allowed_is_the_most_accurate_and_any_loss_the_fastest(groups: Groups) -> None:
    assert total(groups, by_error(groups, 0))[0] == least_error(groups)
    fastest = sum(min(c.seconds for c in g if c.scheme) for g in groups)
    assert total(groups, by_error(groups, 300))[1] == fastest


@given(groups, st.floats(0, 10))
def test_no_single_step_would_be_faster_within_the_goal(groups: Groups, loss_db: float) -> None:
    choice = by_error(groups, loss_db)
    error, seconds = total(groups, choice)
    allowed = least_error(groups) * 10 ** (loss_db / 10)
    for index, group in enumerate(groups):
        now = group[choice[index]]
        for other in (c for c in group if c.scheme):
            fits = error - now.error + other.error <= allowed * (1 - 1e-9)
            assert not (fits and other.seconds < now.seconds and other.error <= now.error)
    assert seconds >= 0


def test_only_float_stays_float() -> None:
    assert by_error([[candidate(0.0, 1.0)]], 1.0) == (0,)
    assert by_metric([[candidate(0.0, 1.0)]], lambda choice: 0.0, 0.0) == (0,)


@given(groups, st.floats(0.5, 3000))
def test_the_metric_is_kept(groups: Groups, allowed: float) -> None:
    """A metric that drops with the error: the result fits, and few evaluations found it."""
    calls: list[Choice] = []

    def drop(choice: Choice) -> float:
        calls.append(choice)
        return total(groups, choice)[0]

    choice = by_metric(groups, drop, allowed)
    assert total(groups, choice)[0] <= allowed
    assert len(calls) <= math.log2(2 * len(groups) + 1) + 2


def test_the_most_sensitive_site_is_raised_first() -> None:
    groups = [
        [candidate(0.0, 9.0), candidate(1.0, 2.0, Scheme()), candidate(error, 1.0, Scheme())]
        for error in (3.0, 50.0, 4.0)
    ]
    assert by_metric(groups, lambda choice: total(groups, choice)[0], 10.0) == (2, 1, 2)


def test_every_choice_of_three_small_groups_is_no_faster() -> None:
    """Against all choices, where the greedy order happens to be the best."""
    groups = [
        [candidate(0.0, 9.0), candidate(1.0, 4.0, Scheme()), candidate(1.1, 1.0, Scheme())]
        for _ in range(3)
    ]
    choice = by_error(groups, 10 * math.log10(3.25 / 3))
    indices = [range(1, len(g)) for g in groups]
    fitting = [c for c in itertools.product(*indices) if total(groups, c)[0] <= 3.25]
    assert total(groups, choice)[1] == min(total(groups, c)[1] for c in fitting)
