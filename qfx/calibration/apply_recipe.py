"""Runs a model with a recipe without compiling it, so that many recipes can be tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from qfx.cost.model import Costs
from qfx.dynamo_backend.captured_graphs import rewritten, watch
from qfx.pipeline import Context
from qfx.plan.plan import Plan
from qfx.values.config import Config


def quantized(model: Callable[..., Any], config: Config) -> Callable[..., Any]:
    """Returns a function that runs `model` for inference: its matmuls as `config.recipe` says, and
    everything else in float."""
    config = replace(config, smoothing=False)
    made: dict[Any, Callable[..., Any]] = {}

    def run(gm: fx.GraphModule, here: Mapping[str, str], arguments: Sequence[Any]) -> Any:
        key = gm, tuple(here.items())
        if key not in made:
            made[key] = _int8(gm, here, config)
        return made[key](*arguments)

    return lambda *inputs, **keywords: watch(model, run, *inputs, **keywords)


def _int8(gm: fx.GraphModule, here: Mapping[str, str], config: Config) -> Callable[..., Any]:
    return rewritten(gm, Context(config, Costs(), here, None, decided=_by_recipe))


def _by_recipe(plan: Plan) -> Plan:
    return Plan(tuple(e if e.recipe else replace(e, scheme=None) for e in plan.entries))
