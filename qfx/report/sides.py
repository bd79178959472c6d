"""Sides: the two ways to run a whole model that a report compares, the int8 side and the float
side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from qfx.cost.model import Costs
from qfx.cost.timing import timed
from qfx.dynamo_backend.captured_graphs import rewritten, watch_compiled
from qfx.host.dynamo import uncompiled, uncompiled_module
from qfx.nn.recurrent import Recurrent
from qfx.ops.guard_counts import taken
from qfx.pipeline import Context
from qfx.plan.plan import Plan
from qfx.report.float_forms import computing_in_float
from qfx.report.module_calls import by_modules
from qfx.report.routing import blocks_of, keeping_choices
from qfx.report.side_by_side import TRIAL
from qfx.report.whole_model import Side
from qfx.values.config import Config
from qfx.weights.model_restore import module_of, unchanged

Make = Callable[[fx.GraphModule, Mapping[str, str]], Callable[..., Any]]


@dataclass(frozen=True)
class Sides:
    """Two ways to run `model`: in int8 and in float. `modules`: its int8 modules by name.
    `as_called`: True if the model runs as it is, False if it runs as torch.compile with qfx
    rewrites it."""

    model: Callable[..., Any]
    modules: Mapping[str, nn.Module]
    reference: nn.Module | None
    as_called: bool
    config: Config
    costs: Costs

    @property
    def in_int8(self) -> Side:
        """The way to run the model in int8: as it is called, or by its graphs as qfx rewrites
        them."""
        if self.as_called:
            return Side(_called(self.model), "the model as it is called", module_of(self.model))
        words = "its graphs as qfx rewrites them, operator by operator, without Inductor"
        return Side(_within_graphs(self.model, self._rewritten), words)

    @property
    def in_float(self) -> Side:
        """The way to run the model in float: the reference model, the model with dequantized
        weights, or its graphs as they were captured."""
        if self.reference is not None:
            reference = uncompiled_module(self.reference)
            return Side(self._referred, "the reference model as it is called", reference)
        if self.modules:
            words = "the same model with its weights dequantized, which is not timed"
            return Side(self._dequantized, words, module_of(self.model))
        words = "its graphs as they were captured, operator by operator, without Inductor"
        return Side(_within_graphs(self.model, lambda gm, here: gm.forward), words)

    def _rewritten(self, gm: fx.GraphModule, here: Mapping[str, str]) -> Callable[..., Any]:
        return rewritten(gm, Context(self.config, self.costs, here, None, decided=_counted_apart))

    def _referred(self, *args: Any, **kwargs: Any) -> tuple[Any, float]:
        assert self.reference is not None
        with unchanged(self.reference, "explain"):
            return _called(self.reference)(*args, **kwargs)

    def _dequantized(self, *args: Any, **kwargs: Any) -> tuple[Any, float]:
        module = module_of(self.model)
        assert module is not None
        eager = torch.compiler.set_stance("force_eager")
        layers = [m for m in module.modules() if isinstance(m, Recurrent)]
        with eager, by_modules(module), computing_in_float(self.modules, layers) as spent:
            output, seconds = _called(uncompiled(self.model))(*args, **kwargs)
            return output, max(seconds - spent(), 1e-9)


def _called(model: Callable[..., Any]) -> Callable[..., tuple[Any, float]]:
    """Returns a function that runs the model, and returns its output and the seconds of the whole
    call."""
    return lambda *args, **kwargs: timed(lambda: model(*args, **kwargs))


def _within_graphs(model: Callable[..., Any], make: Make) -> Callable[..., tuple[Any, float]]:
    """Returns a function that runs the model with `make(graph, names)` in place of each captured
    graph, and returns its output and the seconds that these replacements took. Each is made
    once."""
    made: dict[Any, Callable[..., Any]] = {}
    blocks = blocks_of(module_of(model))

    def run(*args: Any, **kwargs: Any) -> tuple[Any, float]:
        seconds = 0.0

        def look(gm: fx.GraphModule, here: Mapping[str, str], arguments: Sequence[Any]) -> Any:
            nonlocal seconds
            key = gm, tuple(here.items())
            if key not in made:
                made[key] = make(keeping_choices(gm, here, blocks), here)
            output, spent = timed(lambda: made[key](*arguments))
            seconds += spent
            return output

        output = watch_compiled(model, look, *args, **kwargs)
        taken(TRIAL)
        return output, max(seconds, 1e-9)

    return run


def _counted_apart(plan: Plan) -> Plan:
    """Returns the plan with guards that `qfx.guard_counts()` does not count."""
    guards = [e.guard and e.guard._replace(site=TRIAL) for e in plan.entries]
    return Plan(
        tuple(replace(e, guard=guard) for e, guard in zip(plan.entries, guards, strict=True))
    )
