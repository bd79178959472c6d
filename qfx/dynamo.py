"""The Dynamo backend: `torch.compile(model, backend="qfx", options={...})`.

clone -> match -> plan -> rewrite -> fuse -> inner compiler; a wrapper feeds the packed weights
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from qfx.apart import compile_apart
from qfx.canonical import rewrite
from qfx.capture import clone, targets
from qfx.config import Config, parse_options
from qfx.cost import MachineCost
from qfx.fault import FAULTS
from qfx.feed import drop_unused_inputs, with_packed_weights
from qfx.feed import example_inputs as fed_examples
from qfx.frame import prefixes
from qfx.fuse import fuse
from qfx.gpu.cost import cost_of
from qfx.inductor import inductor
from qfx.match import match
from qfx.names import known_names, name_nodes
from qfx.opened import open_operators
from qfx.patterns import check_names
from qfx.plan import Plan, decide, guard_sizes
from qfx.printable import printable
from qfx.provide import NewInputs, as_placeholders
from qfx.repacked import forget, mark_repacked, reporter
from qfx.site import Site

log = logging.getLogger(__name__)
Compiled = Callable[..., Any]


def qfx(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Compiled:
    """Compiles one captured graph with its matmuls in int8 where that is legal and faster.

    `options`: the fields of `qfx.Config` (`scheme`, `recipe`, `skip`, `only`, `minimum_gain`...);
    other names go to Inductor. `mode`: as for Inductor. Raises ValueError for an unknown option,
    and for a pattern or a recipe that does not match the model. What stays float is reported by
    `qfx.explain` with its reason.
    """
    config, inner_options = parse_options(options)
    inner = _inner_compiler(config, inner_options, mode)
    copy = clone(gm)
    mark_repacked(copy)
    try:
        plan, added = _int8(copy, config, example_inputs)
    except FAULTS as fault:
        _warn_of_fault(fault)
        return inner(clone(gm), example_inputs)
    _record(plan, copy)
    if not added:
        return inner(copy, example_inputs)
    feed = drop_unused_inputs(copy, added)
    below = config.inner == "inductor" and not _switches_gradients(copy)
    compiled = inner(copy, fed_examples(feed, example_inputs))
    compiled = _below_autograd(compiled) if below else compiled
    return with_packed_weights(compiled, feed, reporter(gm))


qfx.reset = forget  # type: ignore[attr-defined]  # torch._dynamo.reset() calls it


def _int8(gm: fx.GraphModule, config: Config, examples: Sequence[Any]) -> tuple[Plan, NewInputs]:
    name_nodes(gm, examples, config.recipe)
    plan = plan_of(gm, config)
    guard_sizes(plan)
    compile_apart([entry.match for entry in plan.entries], config)
    added = NewInputs()
    fuse(rewrite(gm, plan, as_placeholders(gm, added)))
    return plan, added


def plan_of(gm: fx.GraphModule, config: Config, training: bool = False) -> Plan:
    """Match and decide; `training`: gradients are recorded at every site. Raises ValueError for a
    pattern that matches nothing, or a recipe of another model."""
    matches = match(open_operators(gm), prefixes(config.recipe))
    if training:
        matches = tuple(replace(m, trains=True) if isinstance(m, Site) else m for m in matches)
    check_names(config, known_names(matches))
    return decide(matches, config, MachineCost(), cost_of)


def _inner_compiler(config: Config, options: dict[str, Any], mode: str | None) -> Compiled:
    if config.inner == "eager":
        return _run_as_it_is
    if config.inner == "aot_eager":
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager
    return inductor(options, mode)


def _below_autograd(compiled: Compiled) -> Compiled:
    """Where no gradients are recorded, a compiled graph runs without autograd's kernels: those of
    our operators are Python functions, which take longer than many a call."""

    def run(*arguments: Any) -> Any:
        if torch.is_grad_enabled():
            return compiled(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return compiled(*arguments)

    return run


def _switches_gradients(gm: fx.GraphModule) -> bool:
    """Whether the graph, or a body in it, turns the recording of gradients on or off itself."""
    names = map(str, targets(gm))
    return any("grad_enabled" in name or "inference_mode" in name for name in names)


def _run_as_it_is(gm: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
    for node in gm.graph.nodes:
        node.meta.clear()  # what Dynamo recorded refers to the parameters
    return gm.forward


def _warn_of_fault(fault: BaseException) -> None:
    log.debug("the int8 pass failed", exc_info=fault)
    what, *_ = str(fault).splitlines() or [type(fault).__name__]
    warnings.warn(
        f"qfx failed on a graph and left it float, {printable(what)}. "
        'Please report it with the output of TORCH_LOGS="+qfx".',
        stacklevel=2,
    )


def _record(plan: Plan, gm: fx.GraphModule) -> None:
    log.info("plan\n%s", plan)
    log.debug("graph\n%s", gm.graph)
    torch._logging.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": "qfx_graph", "encoding": "string"},
        payload_fn=lambda: f"{plan}\n\n{gm.graph}",
    )
