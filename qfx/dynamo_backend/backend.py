"""The Dynamo backend: `torch.compile(model, backend="qfx", options={...})`.

A clone of the captured graph goes through the passes of `qfx.pipeline` and then to the inner
compiler; a wrapper around the compiled function passes the packed weights to it. The Python stack
is read only here.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from qfx.cost.device_models import current_costs
from qfx.dynamo_backend.program_compiler import program_compiler
from qfx.dynamo_backend.recompilation import forget, mark_repacked, reporter
from qfx.dynamo_backend.uncompiled_methods import METHODS, warn_of_method
from qfx.graph.capture import clone, targets
from qfx.graph.faults import is_fault
from qfx.host.autograd import below_autograd
from qfx.host.dynamo import (
    aot_eager,
    before_captures,
    before_methods,
    capture_recurrent,
    trace_artifact,
)
from qfx.host.frame import Surroundings, modules_to_run, surroundings
from qfx.host.inductor import inductor
from qfx.host.source_text import released_source_texts
from qfx.io.digest import own_digest
from qfx.io.errors import printable
from qfx.match.module_smoothing import note_factors, tie_to_modules
from qfx.match.naming import name_nodes
from qfx.match.per_layer import compile_per_layer
from qfx.ops import FAKES
from qfx.pipeline import Context, run_passes
from qfx.plan import recurrent_capture
from qfx.plan import unrecognized as unserved
from qfx.plan.by_cost import tie_to_sizes
from qfx.plan.plan import Plan
from qfx.rewriting.constants import NewInputs, as_placeholders, drop_unused_inputs
from qfx.rewriting.saved_activations import compress
from qfx.values.config import Config, parse_options
from qfx.weights.cache import CACHE
from qfx.weights.graph_inputs import example_inputs as graph_examples
from qfx.weights.graph_inputs import with_packed_weights

log = logging.getLogger(__name__)
Compiled = Callable[..., Any]


@released_source_texts()
def qfx(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Compiled:
    """Compiles one captured graph with its matmuls in int8 where that is legal and faster.

        compiled = torch.compile(model, backend="qfx", options={"scheme": "w8a8"})

    `options`: the fields of `qfx.Config` (`scheme`, `recipe`, `skip`, `only`, `minimum_gain`...);
    other names are passed to Inductor. `mode`: the mode of Inductor. Raises ValueError for an
    unknown option, and for a pattern or a recipe that does not match the model. `qfx.explain`
    reports which matmuls stay float, with the reason.
    """
    config, inner_options = parse_options(options)
    inner = _inner_compiler(config, inner_options, mode)
    copy, added, here = clone(gm), NewInputs(), surroundings()
    warning_texts: list[str] = []
    try:
        plan = _int8(copy, config, example_inputs, here, added, warning_texts)
    except Exception as error:
        if not is_fault(error):
            raise
        _warn_of_fault(error)
        return inner(clone(gm), example_inputs)
    for text in warning_texts:
        warnings.warn(text, stacklevel=2)
    _record(plan, copy)
    if not added:
        return inner(copy, example_inputs)
    graph_inputs = drop_unused_inputs(copy, added)
    below = config.inner == "inductor" and not _switches_gradients(copy)
    real = config.inner == "program"
    compiled = inner(copy, graph_examples(graph_inputs, example_inputs, real))
    compiled = _below_autograd(compiled) if below else compiled
    offload_weight = _offloading() if config.release_weights else None
    return with_packed_weights(
        compiled, graph_inputs, reporter(gm, here.code), offload_weight=offload_weight
    )


def _decide_on_recurrent(backend: Any) -> None:
    """Makes Dynamo capture the recurrent layers of the modules that run if each becomes int8, and
    warns of those that it leaves out."""
    if not _is_qfx(backend):
        return
    modules = modules_to_run()
    layers = recurrent_capture.recurrent_layers(modules)
    if not layers:
        return
    options = getattr(backend, "kwargs", {}).get("options")
    config = parse_options(options)[0]
    if recurrent_capture.become_int8(layers, modules, config):
        capture_recurrent()
    elif not (config.skip or config.only or config.recipe):
        text = recurrent_capture.warning_outside(layers)
        if text is not None:
            warnings.warn(text, stacklevel=2)


def _is_qfx(backend: Any) -> bool:
    return getattr(backend, "compiler_fn", backend) is qfx


def _before_method(backend: Any, name: str, model: nn.Module) -> None:
    if _is_qfx(backend):
        warn_of_method(name, model)


before_captures(_decide_on_recurrent)
before_methods(METHODS, _before_method)


def _forget() -> None:
    forget()
    unserved.forget()
    recurrent_capture.forget()


qfx.reset = _forget  # type: ignore[attr-defined]  # torch._dynamo.reset() calls it


def _int8(
    gm: fx.GraphModule,
    config: Config,
    examples: Sequence[Any],
    here: Surroundings,
    added: NewInputs,
    warning_texts: list[str],
) -> Plan:
    """Rewrites the graph and returns its plan. Appends to `warning_texts`."""
    wanted = config.recipe_names
    mark_repacked(gm, here)
    name_nodes(gm, examples, here, wanted)
    if config.smoothing:
        note_factors(gm, examples, here)

    def decided(plan: Plan) -> Plan:
        matches = [entry.match for entry in plan.entries]
        selective = bool(config.skip or config.only or config.recipe)
        text = unserved.warning_of(gm, matches, here.modules, here.code, selective)
        warning_texts.extend([text] if text else [])
        tie_to_sizes(plan)
        compile_per_layer(matches, config, here)
        sites = config.recipe.sites if config.recipe else ()
        if any(entry.recipe and entry.recipe not in sites for entry in plan.entries):
            tie_to_modules(here)
        return plan

    provide = partial(as_placeholders, added=added)
    context = Context(
        config, current_costs(), here.prefixes(wanted), here.modules, provide, decided=decided
    )
    return run_passes(gm, context).plan


def _offloading() -> Callable[[Tensor], bool]:
    """Returns a function like `CACHE.offload_weight` that stops after the first refusal by the
    system: then the weights stay in memory, with a warning."""
    refused: list[OSError] = []

    def offload_weight(weight: Tensor) -> bool:
        try:
            return not refused and CACHE.offload_weight(weight)
        except OSError as why:
            refused.append(why)
            warnings.warn(f"release_weights: float weights stay in memory: {why}", stacklevel=2)
            return False

    return offload_weight


def _inner_compiler(config: Config, options: dict[str, Any], mode: str | None) -> Compiled:
    if config.inner == "eager":
        return _run_as_it_is
    if config.inner == "aot_eager":
        return aot_eager()
    operators = [getattr(torch.ops.qfx, name) for name in FAKES]
    coded = compress if config.saved_activations == "int8" else None
    by_inductor = partial(inductor, options, mode, operators, f"qfx-{own_digest()}", coded)
    return program_compiler(by_inductor) if config.inner == "program" else by_inductor()


def _below_autograd(compiled: Compiled) -> Compiled:
    """Returns the compiled graph as a function that skips autograd's kernels if no gradients are
    recorded: the autograd kernels of qfx's operators are Python functions, which take longer than
    many of the operators."""

    def run(*arguments: Any) -> Any:
        if torch.is_grad_enabled():
            return compiled(*arguments)
        with below_autograd():
            return compiled(*arguments)

    return run


def _switches_gradients(gm: fx.GraphModule) -> bool:
    """Whether the graph, or a subgraph of a higher-order operator in it, turns the recording of
    gradients on or off itself."""
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
    trace_artifact("qfx_graph", lambda: f"{plan}\n\n{gm.graph}")
