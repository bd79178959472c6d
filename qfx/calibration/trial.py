"""Trial: a model with a recipe, at once: nothing is compiled, so that many recipes can be tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from qfx.canonical import rewrite
from qfx.capture import clone
from qfx.config import Config
from qfx.feed import drop_unused_inputs, with_packed_weights
from qfx.fuse import fuse
from qfx.match import match
from qfx.plan import Plan, decide
from qfx.provide import NewInputs, as_placeholders
from qfx.watch import watch


def quantized(model: Callable[..., Any], config: Config) -> Callable[..., Any]:
    """`model` with the sites of `config.recipe` in int8 and all else in float, for inference."""
    made: dict[Any, Callable[..., Any]] = {}

    def run(gm: fx.GraphModule, here: Mapping[str, str], arguments: Sequence[Any]) -> Any:
        key = gm, tuple(here.items())
        if key not in made:
            made[key] = _int8(gm, here, config)
        return made[key](*arguments)

    return lambda *inputs, **keywords: watch(model, run, *inputs, **keywords)


def _int8(gm: fx.GraphModule, here: Mapping[str, str], config: Config) -> Callable[..., Any]:
    copy, added = clone(gm), NewInputs()
    decided = decide(match(copy, here), config, None)
    plan = Plan(tuple(e if e.recipe else replace(e, scheme=None) for e in decided.entries))
    fuse(rewrite(copy, plan, as_placeholders(copy, added)))
    if not added:
        return copy.forward
    feed = drop_unused_inputs(copy, added)  # before `forward` is read: it recompiles
    return with_packed_weights(copy.forward, feed)
