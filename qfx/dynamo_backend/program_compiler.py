"""The inner compiler "program": runs a rewritten graph as a program (qfx/programs), without
gradients and for fixed shapes. Another compiler takes the graphs that no program can run.

Programs hold the addresses of weights. Layers with equal graphs call the same compiled function,
each with its own weights, and weights may be replaced, so a program is made for each set of weights
that the function is called with.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from qfx.graph.capture import is_constant, targets
from qfx.host.aten_graphs import aten_graph
from qfx.host.tensors import is_fake, wraps_tensors
from qfx.programs import Runner, build

log = logging.getLogger(__name__)
Compiled = Callable[..., Any]
_MODES = ("grad_enabled", "inference_mode", "autocast")
MOST_OUTSIDE = 0.1  # share of a graph's operators that PyTorch may run


def program_compiler(other: Compiled) -> Compiled:
    """Returns a function that compiles a graph to a program. `other`: the compiler of graphs for
    which there is none; the log says why."""

    def compile_graph(gm: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        why = _why_none(gm, inputs)
        constant = [is_constant(n) for n in gm.graph.find_nodes(op="placeholder")]
        try:
            found = None if why else _Programs(aten_graph(gm, inputs), constant, inputs)
        except NotImplementedError as error:
            why, found = str(error), None
        if found is None:
            log.info("Inductor compiles a graph, not the inner compiler 'program': %s", why)
            return other(gm, inputs)
        return found

    return compile_graph


def _why_none(gm: fx.GraphModule, inputs: Sequence[Any]) -> str | None:
    """Returns the reason why a graph can have no program, None if none is known before it is
    built."""
    if any(not isinstance(x, Tensor) for x in inputs):
        return "it has sizes that may change, or other inputs that are no tensors"
    if any(type(n) is not int for x in inputs for n in x.shape):
        return "it has sizes that may change"
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return "it records gradients"
    if any(wraps_tensors(x) for x in inputs):
        return "an input is a tensor of a subclass"
    if devices := sorted({str(x.device) for x in inputs if x.device.type != "cpu"}):
        return f"it runs on {', '.join(devices)}"
    if any(mode in str(target) for target in targets(gm) for mode in _MODES):
        return "it switches autocast or the recording of gradients"
    if any(isinstance(m, fx.GraphModule) for m in gm.children()):
        return "it has subgraphs"
    return None


class _Programs:
    """A compiled graph: a program for each set of constants that it is called with."""

    def __init__(self, gm: fx.GraphModule, constant: list[bool], inputs: Sequence[Tensor]) -> None:
        """`gm`: a graph of aten operators. `constant`: whether each input is a parameter, a buffer
        or a packed weight. Raises NotImplementedError if there is no program for the graph."""
        self._gm = gm
        self._constant = [i for i, kept in enumerate(constant) if kept]
        self._given = [i for i, kept in enumerate(constant) if not kept]
        self._known: dict[tuple[int, ...], tuple[Runner, list[weakref.ref[Tensor]]]] = {}
        if not any(is_fake(x) for x in inputs):
            self._build(tuple(inputs))

    def __call__(self, *arguments: Any) -> Any:
        if torch.is_grad_enabled() and any(x.requires_grad for x in arguments):
            return self._gm(*arguments)
        key = tuple([arguments[i].data_ptr() for i in self._constant])
        found = self._known.get(key)
        runner = self._build(arguments, key) if found is None else found[0]
        return tuple(runner(*[_plain(arguments[i]) for i in self._given]))

    def _build(self, arguments: Sequence[Tensor], key: tuple[int, ...] | None = None) -> Runner:
        constants = [arguments[i] for i in self._constant]
        with torch.no_grad():
            runner = build(_bound(self._gm, self._constant, constants),
                           [arguments[i].detach() for i in self._given])  # fmt: skip
        operators = sum(n.op == "call_function" for n in self._gm.graph.nodes)
        outside = runner.outside
        if len(outside) > MOST_OUTSIDE * operators:
            names = ", ".join(sorted({*outside}))
            raise NotImplementedError(
                f"PyTorch would run {len(outside)} of its {operators} operators: {names}"
            )
        alive = {k: v for k, v in self._known.items() if all(t() is not None for t in v[1])}
        key = tuple([x.data_ptr() for x in constants]) if key is None else key
        self._known = {**alive, key: (runner, [weakref.ref(x) for x in constants])}
        return runner


def _bound(gm: fx.GraphModule, places: Sequence[int], tensors: Sequence[Tensor]) -> fx.GraphModule:
    """Returns a copy of the graph in which these inputs are buffers."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    held = dict(zip(places, tensors, strict=True))
    root: dict[str, Any] = {}
    placeholders = list(gm.graph.find_nodes(op="placeholder"))
    for node in gm.graph.nodes:
        if node.op == "placeholder" and (i := placeholders.index(node)) in held:
            root[f"constant_{i}"] = held[i].detach()
            values[node] = graph.get_attr(f"constant_{i}")
            values[node].meta = dict(node.meta)
        else:
            if node.op == "get_attr":
                root[node.target] = gm.get_parameter(node.target) if False else getattr(gm, node.target)
            values[node] = graph.node_copy(node, values.__getitem__)
    return fx.GraphModule(root, graph)


def _plain(x: Tensor) -> Tensor:
    return x.resolve_neg().contiguous()
