"""A symbolic M: the break-even is a condition, printed, and guarded only where both sides occur."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, fx, nn
from torch._dynamo import mark_dynamic
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.utils import counters

import qfx
from qfx.cost.model import Estimate, Work
from qfx.graph.capture import value
from qfx.plan.breakeven import condition
from qfx.plan.plan import Plan
from tests.conftest import UseCosts
from tests.dynamo_backend.test_backend import _int8_calls
from tests.lib.costs import Free


class Step(Free):
    """int8 gains from M = `start` on, and not beyond `stop`."""

    def __init__(self, start: int, stop: int = 10**9) -> None:
        self.start, self.stop = start, stop

    def estimate(self, work: Work) -> Estimate:
        return Estimate(2.0 if self.start <= work.m < self.stop else 0.5, 1.0)


def _symbol(size: Callable[[int], Any] = lambda n: n) -> torch.SymInt:
    """What a capture knows of size(7)."""
    seen: list[Any] = []

    def look(gm: fx.GraphModule, inputs: Any) -> Any:
        (result,) = gm.graph.output_node().args[0]
        seen.append(value(result).shape[0])
        return gm.forward

    run = torch.compile(lambda x, n: x[:1].expand(size(n), -1) + 0, backend=look, dynamic=True)
    run(torch.randn(40, 4), 7)
    return seen[-1]


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [
        (0, 10**9, "True"),
        (5000, 10**9, "False"),
        (3, 10**9, "{m} >= 3"),
        (37, 10**9, "{m} >= 37"),
        (0, 100, "{m} < 100"),
        (5, 90, "({m} >= 5) & ({m} < 90)"),
    ],
)
def test_condition(start: int, stop: int, expected: str) -> None:
    m = _symbol()
    where = condition(m, lambda size: start <= size < stop)
    assert str(where) == expected.format(m=m.node.expr)


def test_a_captured_size_beyond_the_samples_counts() -> None:
    """Its decision and its condition agree."""
    m = _symbol(lambda n: n**6)
    assert m.node.hint == 7**6
    assert str(condition(m, lambda size: size > 10_000)) == f"{m.node.expr} >= 10001"


# int8 gains from `start` on. The sizes of n = 5 and n = 23 lie on both sides of it; none is 1.
EXPRESSIONS: dict[str, tuple[Callable[[int], int], int]] = {
    "difference": (lambda n: 40 - n, 20),
    "quotient": (lambda n: 100 // n, 10),
    "multiple": (lambda n: n - n % 4, 10),
    "product": (lambda n: n * n, 50),
    "float": (lambda n: int(n * 0.7), 10),
    "root": (lambda n: int(n**0.5), 3),
    "ceiling": (lambda n: math.ceil(n / 3), 5),
    "rounded": (lambda n: round(n / 2), 5),
    "bits": (lambda n: n ^ 3, 10),
    "maximum": (lambda n: torch.sym_max(n, 6), 10),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_both_sides_of_an_expression(use_costs: UseCosts, name: str) -> None:
    """Whatever its range is: not all of them have a lower end."""
    size, start = EXPRESSIONS[name]
    use_costs(Step(start))
    counters.clear()
    linear = nn.Linear(8, 8)
    f = torch.compile(
        lambda x, n: linear(x[:1].expand(size(n), -1)),
        backend=qfx.backend,
        dynamic=True,
        options={"inner": "eager"},
    )
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="qfx")
        for n in (5, 23, 5, 23):
            f(torch.randn(1, 8), n)
            assert _int8_calls(f, torch.randn(1, 8), n) == (size(n) >= start)
    assert counters["stats"]["unique_graphs"] == 2


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    found: list[Plan] = []
    monkeypatch.setattr("qfx.dynamo_backend.backend._record", lambda plan, gm: found.append(plan))
    return found


def _run(
    use_costs: UseCosts,
    cost: Step,
    sizes: list[int],
    mark: Callable[[Tensor], Any] | None = None,
) -> list[int]:
    """int8 calls at each size, all by one compiled function."""
    use_costs(cost)
    counters.clear()
    model, dynamic = nn.Sequential(nn.Linear(8, 8)), None if mark else True
    f = torch.compile(model, backend=qfx.backend, dynamic=dynamic, options={"inner": "eager"})
    calls = []
    for size in sizes:
        x = torch.randn(size, 8)
        if mark is not None:
            mark(x)
        with torch.no_grad():
            calls.append(_int8_calls(f, x))
    return calls


def test_both_sides_occur(use_costs: UseCosts, plans: list[Plan]) -> None:
    """One graph for each side of the break-even, and each size runs on its own."""
    assert _run(use_costs, Step(10), [4, 20, 5, 9, 10, 300]) == [0, 1, 0, 0, 1, 1]
    assert counters["stats"]["unique_graphs"] == 2
    assert ["int8 where" in str(plan) and ">= 10" in str(plan) for plan in plans] == [True, True]
    assert all(isinstance(p.entries[0].where, sympy.Basic) for p in plans)


@pytest.mark.parametrize(("start", "calls"), [(0, 1), (10**6, 0)])
def test_no_guard_where_one_side_cannot_occur(use_costs: UseCosts, start: int, calls: int) -> None:
    assert _run(use_costs, Step(start), [4, 20, 300, 5000]) == [calls] * 4
    assert counters["stats"]["unique_graphs"] == 1


def test_two_sides_of_a_range(use_costs: UseCosts) -> None:
    assert _run(use_costs, Step(10, 30), [4, 20, 50, 9, 10, 29, 30]) == [0, 1, 0, 0, 1, 1, 0]
    assert counters["stats"]["unique_graphs"] == 2


# What the user promised of a size, and what int8 does then where it gains from `start` on.
PROMISES: dict[str, tuple[Callable[[Tensor], Any], int, list[int], list[int], int, str]] = {
    "dynamic": (
        lambda x: mark_dynamic(x, 0), 10, [4, 20, 5, 300], [0, 1, 0, 1], 2, "int8 where",
    ),
    "a_range_with_both_sides": (
        lambda x: mark_dynamic(x, 0, min=2, max=64), 10, [20, 5, 40], [1, 1, 1], 1,
        "not guarded: mark_dynamic asks for one graph from 2 to 64",
    ),
    "a_range_on_one_side": (
        lambda x: mark_dynamic(x, 0, min=12, max=64), 10, [20, 15], [1, 1], 1, "predicted",
    ),
    "one_size_apart": (
        lambda x: mark_dynamic(x, 0), 3, [2, 20], [0, 0], 1,
        "not guarded: mark_dynamic forbids a graph for 2 alone",
    ),
    "of_data": (
        lambda x: mark_unbacked(x, 0), 3, [2, 20], [1, 1], 1,
        "its gain was not predicted; int8 where u0 >= 3, not guarded: it depends on data",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROMISES)
def test_no_guard_breaks_a_promise(use_costs: UseCosts, plans: list[Plan], name: str) -> None:
    mark, start, sizes, calls, graphs, reason = PROMISES[name]
    assert _run(use_costs, Step(start), sizes, mark) == calls
    assert counters["stats"]["unique_graphs"] == graphs
    assert reason in plans[0].entries[0].reason


@pytest.mark.parametrize(
    ("least", "most", "int8", "reason"),
    [
        (0, 8, 0, "int8 would be below minimum_gain=1.1 for every M that can occur"),
        (20, 99, 1, "int8 predicted to reach minimum_gain=1.1 for every M that can occur"),
    ],
)
def test_a_size_that_depends_on_data_is_decided_by_its_range(
    use_costs: UseCosts,
    plans: list[Plan],
    least: int,
    most: int,
    int8: int,
    reason: str,
) -> None:
    use_costs(Step(10))
    linear = nn.Linear(8, 8)

    def run(x: Tensor) -> Tensor:
        chosen = x[x[:, 0] > 0]
        torch._check(chosen.shape[0] >= least)
        torch._check(chosen.shape[0] <= most)
        return linear(chosen)

    f = torch.compile(run, backend=qfx.backend, options={"inner": "eager"})
    settings = {"capture_dynamic_output_shape_ops": True}
    with torch.no_grad(), torch._dynamo.config.patch(**settings):
        assert _int8_calls(f, torch.ones(least + 3, 8)) == int8
    assert plans[0].entries[0].reason == reason
