"""Watch: run a model with every graph that Dynamo captures handed to a watcher, in float.

The watcher is a function (graph, prefixes, arguments) -> outputs; prefixes as for `qfx.match`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx, nn

from qfx.apart import capture_apart
from qfx.capture import clone, trace
from qfx.frame import compiled_frame
from qfx.names import name_nodes
from qfx.opened import open_operators
from qfx.repacked import mark_repacked
from qfx.unchanged import keep_written

Watcher = Callable[[fx.GraphModule, Mapping[str, str], Sequence[Any]], Any]
_WATCHER: ContextVar[Watcher] = ContextVar("watcher")


def watch(
    model: Callable[..., Any],
    watcher: Watcher,
    *inputs: Any,
    dynamic: bool | None = None,
    **keyword_inputs: Any,
) -> Any:
    """`model(*inputs, **keyword_inputs)` without gradients; an `fx.GraphModule` is one graph."""
    token = _WATCHER.set(watcher)
    try:
        with torch.no_grad():
            if isinstance(model, fx.GraphModule):
                return _watched(trace(model, *inputs))(*inputs)
            plain = _uncompiled(model)
            return torch.compile(plain, backend=_look, dynamic=dynamic)(*inputs, **keyword_inputs)
    finally:
        _WATCHER.reset(token)


def _look(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """The backend. One function for all calls: a second one reuses Dynamo's code."""
    graph = clone(gm)
    mark_repacked(graph)
    name_nodes(graph, example_inputs)
    capture_apart(graph)
    return torch._dynamo.disable(_watched(graph))


def _watched(graph: fx.GraphModule) -> Callable[..., Any]:
    """Runs a graph of its own, whose operators it opens, by the watcher of the call."""
    open_operators(graph)
    frame, keep = compiled_frame(), keep_written(graph)

    def run(*arguments: Any) -> Any:
        # Dynamo runs one graph for layers that are alike: the one that runs now gives the names
        keep(arguments)
        return _WATCHER.get()(graph, frame.prefixes(), arguments)

    return run


def _uncompiled(model: Callable[..., Any]) -> Callable[..., Any]:
    """The model under `torch.compile(model)` or `model.compile()`."""
    model = getattr(model, "_orig_mod", getattr(model, "_torchdynamo_orig_callable", model))
    if getattr(model, "_compiled_call_impl", None) is not None:
        return model.forward  # type: ignore[union-attr]
    return model


def uncompiled_module(model: nn.Module) -> nn.Module:
    return getattr(model, "_orig_mod", model)
