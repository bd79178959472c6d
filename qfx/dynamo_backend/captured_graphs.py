"""Watch: runs a model in float and passes every graph that Dynamo captures to a watcher.

The watcher is a function (graph, prefixes, arguments) -> outputs, with prefixes as for `match`. It
may run the graph in int8 by `rewritten`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from qfx.dynamo_backend.recompilation import mark_repacked
from qfx.graph.capture import clone, trace
from qfx.graph.decomposition import open_operators
from qfx.graph.writes import written_constants
from qfx.host.dynamo import before_captures, capture_recurrent, uncompiled, without_skip_marks
from qfx.host.frame import Frame, modules_to_run, surroundings
from qfx.host.source_text import released_source_texts
from qfx.io.errors import UserError
from qfx.match.module_smoothing import note_factors, tie_to_modules
from qfx.match.naming import name_nodes
from qfx.match.per_layer import capture_per_layer
from qfx.pipeline import Context, run_passes
from qfx.plan.recurrent_capture import become_int8, recurrent_layers
from qfx.rewriting.constants import NewInputs, as_placeholders, drop_unused_inputs
from qfx.values.config import Config
from qfx.weights.graph_inputs import with_packed_weights
from qfx.weights.model_restore import restore_later

Watcher = Callable[[fx.GraphModule, Mapping[str, str], Sequence[Any]], Any]
_WATCHER: ContextVar[Watcher] = ContextVar("watcher")


def watch(
    model: Callable[..., Any],
    watcher: Watcher,
    *inputs: Any,
    dynamic: bool | None = None,
    **keyword_inputs: Any,
) -> Any:
    """Runs `model(*inputs, **keyword_inputs)` without gradients, with `watcher` for each captured
    graph, and returns the result. An `fx.GraphModule` is one graph.

    Raises UserError for keyword inputs of an `fx.GraphModule`.
    """
    with torch.no_grad():
        return _run(model, watcher, dynamic, inputs, keyword_inputs)


def watch_compiled(
    model: Callable[..., Any], watcher: Watcher, *inputs: Any, **keyword_inputs: Any
) -> Any:
    """Runs like `watch`, but with the graphs that `torch.compile(model)` captures for the sizes of
    these inputs. This applies to an `fx.GraphModule` too, so that Dynamo traces into its leaf
    modules."""
    with torch.no_grad():
        return _run(model, watcher, False, inputs, keyword_inputs, opened=True)


def watch_recording(
    model: Callable[..., Any], watcher: Watcher, *inputs: Any, **keyword_inputs: Any
) -> Any:
    """Runs like `watch`, but while autograd records the computation, also between the graphs."""
    with torch.inference_mode(False), torch.enable_grad():
        return _run(model, watcher, None, inputs, keyword_inputs)


@released_source_texts()
def _run(
    model: Callable[..., Any],
    watcher: Watcher,
    dynamic: bool | None,
    inputs: Sequence[Any],
    keyword_inputs: Mapping[str, Any],
    opened: bool = False,
) -> Any:
    token = _WATCHER.set(watcher)
    try:
        if isinstance(model, fx.GraphModule) and not opened:
            if keyword_inputs:
                names = ", ".join(keyword_inputs)
                raise UserError(
                    f"an fx.GraphModule takes its inputs in order, not by name: {names}"
                )
            return _watched(trace(model, *inputs), Frame())(*inputs)
        plain = uncompiled(model)
        with without_skip_marks():
            return torch.compile(plain, backend=_look, dynamic=dynamic)(*inputs, **keyword_inputs)
    finally:
        _WATCHER.reset(token)


def _look(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """The backend that `watch` uses: returns a function that runs a captured graph by the watcher.
    It is one function for all calls, because Dynamo may reuse code that it compiled for another
    backend function."""
    graph, here = clone(gm), surroundings()
    mark_repacked(graph, here)
    name_nodes(graph, example_inputs, here)
    if note_factors(graph, example_inputs, here):
        tie_to_modules(here)
    capture_per_layer(graph)
    return torch.compiler.disable(_watched(graph, Frame(here.code, here.prefixes())))


def _decide_on_recurrent(backend: Any) -> None:
    """Makes Dynamo capture the recurrent layers that the qfx backend captures."""
    if getattr(backend, "compiler_fn", backend) is _look:
        modules = modules_to_run()
        layers = recurrent_layers(modules)
        if layers and become_int8(layers, modules, Config()):
            capture_recurrent()


before_captures(_decide_on_recurrent)


def _watched(graph: fx.GraphModule, frame: Frame) -> Callable[..., Any]:
    """Returns a function that runs `graph` by the watcher of the `watch` call that is running."""
    open_operators(graph)  # before the graph runs node by node
    written = written_constants(graph)

    def run(*arguments: Any) -> Any:
        # Dynamo runs one graph for similar layers: names are those of the layer that runs now
        restore_later(written(arguments))
        return _WATCHER.get()(graph, frame.prefixes(), arguments)

    return run


def rewritten(gm: fx.GraphModule, context: Context) -> Callable[..., Any]:
    """Returns a function of the arguments of `gm` that runs a rewritten copy of it node by node,
    with packed weights; nothing is compiled. Raises what `run_passes` does."""
    copy, added = clone(gm), NewInputs()
    run_passes(copy, replace(context, provide=partial(as_placeholders, added=added)))
    if not added:
        return copy.forward
    graph_inputs = drop_unused_inputs(copy, added)  # before `forward` is read: it recompiles
    return with_packed_weights(copy.forward, graph_inputs)
