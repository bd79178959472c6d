"""Provides the cost models that predictions use: those of this machine, unless others are set."""

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
    """Returns the cost models of this machine's CPU and of GPUs with a table. Tunes the kernels
    first, unless other models are set."""
    costs = _COSTS.get()
    if costs is not None:
        return costs
    tune_kernels()  # their times depend on it
    return Costs(MachineCost(), cost_of)


@contextmanager
def costs_from(costs: Costs) -> Iterator[None]:
    """Makes compilations inside the `with` block use the cost models `costs`."""
    token = _COSTS.set(costs)
    try:
        yield
    finally:
        _COSTS.reset(token)
