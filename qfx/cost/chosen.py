"""Which cost models predictions come from: those of this machine, unless others are given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from qfx.cost.gpu import cost_of
from qfx.cost.machine import MachineCost
from qfx.cost.model import Costs

_COSTS: ContextVar[Costs | None] = ContextVar("costs", default=None)


def chosen_costs() -> Costs:
    """Those of this machine's CPU and of the GPUs with a table."""
    return _COSTS.get() or Costs(MachineCost(), cost_of)


@contextmanager
def costs_from(costs: Costs) -> Iterator[None]:
    """What is compiled inside is decided by these."""
    token = _COSTS.set(costs)
    try:
        yield
    finally:
        _COSTS.reset(token)
