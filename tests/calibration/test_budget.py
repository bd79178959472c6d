"""The choice under a budget of divergence: within it, and never slower for more of it."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from qfx.calibration.budget import by_bytes, by_divergence
from qfx.calibration.choose import Choice
from qfx.calibration.record import Transform
from qfx.calibration.search import Candidate
from qfx.values.scheme import Scheme

Groups = list[list[Candidate]]


def candidate(divergence: float, seconds: float, scheme: Scheme | None = None) -> Candidate:
    return Candidate(scheme, Transform(), (0.0,), seconds, divergences=(divergence,))


numbers = st.integers(1, 1000).map(float)
int8 = st.builds(candidate, numbers | st.just(math.nan), numbers, st.just(Scheme()))
in_float = st.builds(candidate, st.just(0.0), numbers)
group = st.tuples(in_float, st.lists(int8, max_size=3)).map(lambda t: [t[0], *t[1]])
groups = st.lists(group, min_size=1, max_size=5)
budgets = st.floats(0, 4000) | st.just(math.inf)


def total(groups: Groups, choice: Choice) -> tuple[float, float]:
    """(divergence, seconds)"""
    chosen = [g[i] for g, i in zip(groups, choice, strict=True)]
    return sum(c.divergence for c in chosen), sum(c.seconds for c in chosen)


@given(groups, budgets)
def test_the_budget_is_kept(groups: Groups, budget: float) -> None:
    """And what is not known is not chosen, whatever the budget."""
    divergence, seconds = total(groups, by_divergence(groups, budget))
    assert divergence <= budget and divergence < math.inf
    assert seconds <= sum(g[0].seconds for g in groups)


@given(groups, budgets, budgets)
def test_a_larger_budget_is_never_slower(groups: Groups, a: float, b: float) -> None:
    less, more = sorted((a, b))
    slow, fast = (total(groups, by_divergence(groups, x))[1] for x in (less, more))
    assert fast <= slow


@given(groups)
def test_no_budget_is_the_most_accurate_and_any_the_fastest(groups: Groups) -> None:
    assert total(groups, by_divergence(groups, 0.0))[0] == 0
    fastest = sum(min(c.seconds for c in g if c.divergence < math.inf) for g in groups)
    assert total(groups, by_divergence(groups, math.inf))[1] == fastest


@given(group, budgets)
def test_of_one_group_the_fastest_that_fits_is_taken(group: list[Candidate], budget: float) -> None:
    fitting = [c.seconds for c in group if c.divergence <= budget and c.divergence < math.inf]
    assert total([group], by_divergence([group], budget))[1] == min(fitting)


def test_a_large_step_does_not_bar_the_small_ones() -> None:
    """It saves most for its divergence, but does not fit."""
    large = [candidate(0.0, 200.0), candidate(10.0, 1.0, Scheme())]
    small = [candidate(0.0, 9.0), candidate(1.0, 8.0, Scheme())]
    assert by_divergence([large, small], 5.0) == (0, 1)


def test_the_most_time_for_the_divergence_comes_first() -> None:
    groups = [[candidate(0.0, 9.0), candidate(d, 1.0, Scheme())] for d in (3.0, 2.0, 4.0)]
    assert [by_divergence(groups, b) for b in (2.0, 5.0, 9.0)] == [(0, 1, 0), (1, 1, 0), (1, 1, 1)]


def test_a_site_goes_as_far_as_it_pays() -> None:
    """Along the lower hull: over the candidate in the middle, or by it."""
    ends = [candidate(0.0, 10.0), candidate(10.0, 0.0, Scheme())]
    above, below = (candidate(5.0, s, Scheme()) for s in (6.0, 4.0))
    other = [candidate(0.0, 10.0), candidate(5.0, 4.9, Scheme())]  # is worth 1.02 of a second
    assert by_divergence([[*ends, below], other], 5.0) == (2, 0)
    assert by_divergence([[*ends, above], other], 5.0) == (0, 1)


def test_codes_do_not_change_the_choice() -> None:
    group = [candidate(0.0, 2.0), candidate(1.0, 1.0, Scheme())]
    assert by_divergence([[*group, replace(group[1], seconds=1.5)]], 1.0) == (1,)


sizes = st.builds(
    lambda divergence, size: replace(candidate(divergence, 1.0, Scheme()), bytes=size),
    numbers | st.just(math.nan), st.integers(1, 1000),
)  # fmt: skip
sized = st.lists(st.lists(sizes, min_size=1, max_size=4), min_size=1, max_size=5)


def bytes_and_divergence(groups: Groups, choice: Choice) -> tuple[int, float]:
    chosen = [g[i] for g, i in zip(groups, choice, strict=True)]
    return sum(c.bytes for c in chosen), sum(min(c.divergence, 1e30) for c in chosen)


@given(sized, st.integers(0, 5000), st.integers(0, 5000))
def test_a_budget_of_bytes_is_kept_and_more_is_never_worse(groups: Groups, a: int, b: int) -> None:
    least = sum(min(c.bytes for c in group) for group in groups)
    small, large = (least + extra for extra in sorted((a, b)))
    size, worse = bytes_and_divergence(groups, by_bytes(groups, small))
    assert size <= small
    size, better = bytes_and_divergence(groups, by_bytes(groups, large))
    assert size <= large and better <= worse
