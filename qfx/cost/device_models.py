"""Which cost models predictions come from: those of this machine, unless others are given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from qfx.cost.gpu import cost_of
from qfx.cost.kernels import tune_kernels
from qfx.cost.machine import MachineCost
from qfx.cost.model import Costs

_COSTS: ContextVar[Costs | None] = ContextVar("costs", default=None)


def current_costs() -> Costs:
    """Those of this machine's CPU, whose kernels are tuned by then, and of GPUs with a table."""
    given = _COSTS.get()
    if given is not None:
        return given
    tune_kernels()  # what they take depends on it
    return Costs(MachineCost(), cost_of)


@contextmanager
def costs_from(costs: Costs) -> Iterator[None]:
    """What is compiled inside is decided by these."""
    token = _COSTS.set(costs)
    try:
        yield
    finally:
        _COSTS.reset(token)
