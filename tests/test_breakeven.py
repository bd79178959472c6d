"""A symbolic M: the break-even is a condition, printed, and guarded only where both sides occur."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch import nn
from torch._dynamo.utils import counters

import qfx
from qfx.breakeven import condition
from qfx.plan import Plan
from qfx.prices import Estimate
from tests.test_backend import _int8_calls


class Step:
    """int8 gains from M = `start` on, and not beyond `stop`."""

    def __init__(self, start: int, stop: int = 10**9) -> None:
        self.start, self.stop = start, stop

    def estimate(self, m: int, k: int, n: int, dtype: torch.dtype, scheme: qfx.Scheme) -> Estimate:
        return Estimate(2.0 if self.start <= m < self.stop else 0.5, 1.0)


def _symbol() -> torch.SymInt:
    seen: list[Any] = []

    def look(gm: Any, inputs: Any) -> Any:
        seen.extend(i for i in inputs if isinstance(i, torch.SymInt))
        return gm.forward

    torch.compile(lambda x: x + 1, backend=look, dynamic=True)(torch.randn(7, 4))
    return next(s for s in seen if s.node.hint == 7)


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


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    found: list[Plan] = []
    monkeypatch.setattr("qfx.dynamo._record", lambda plan, gm: found.append(plan))
    return found


def _run(monkeypatch: pytest.MonkeyPatch, cost: Step, sizes: list[int]) -> list[int]:
    """int8 calls at each size, all by one compiled function."""
    monkeypatch.setattr("qfx.dynamo.MachineCost", lambda: cost)
    counters.clear()
    model = nn.Sequential(nn.Linear(8, 8))
    f = torch.compile(model, backend=qfx.backend, dynamic=True, options={"inner": "eager"})
    with torch.no_grad():
        return [_int8_calls(f, torch.randn(size, 8)) for size in sizes]


def test_both_sides_occur(monkeypatch: pytest.MonkeyPatch, plans: list[Plan]) -> None:
    """One graph for each side of the break-even, and each size runs on its own."""
    assert _run(monkeypatch, Step(10), [4, 20, 5, 9, 10, 300]) == [0, 1, 0, 0, 1, 1]
    assert counters["stats"]["unique_graphs"] == 2
    assert ["int8 where" in str(plan) and ">= 10" in str(plan) for plan in plans] == [True, True]
    assert all(isinstance(p.entries[0].where, sympy.Basic) for p in plans)


@pytest.mark.parametrize(("start", "calls"), [(0, 1), (10**6, 0)])
def test_no_guard_where_one_side_cannot_occur(
    monkeypatch: pytest.MonkeyPatch, start: int, calls: int
) -> None:
    assert _run(monkeypatch, Step(start), [4, 20, 300, 5000]) == [calls] * 4
    assert counters["stats"]["unique_graphs"] == 1
