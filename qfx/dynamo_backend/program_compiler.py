"""The inner compiler "program": runs a rewritten graph as a program (qfx/programs), for fixed
shapes and without gradients. Inductor takes the graphs that have no program.

A program holds the addresses of its weights. Layers with equal graphs call one compiled function,
each with its own weights, and packed weights are replaced when the model's weights change, so a
program is built for each set of weights that the function is called with.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from qfx.graph.capture import clone, is_constant, targets
from qfx.graph.writes import written_roots
from qfx.host.aten_graphs import aten_graph
from qfx.host.tensors import is_fake, wraps_tensors
from qfx.programs import Runner, build

log = logging.getLogger(__name__)
Compiled = Callable[..., Any]
MOST_OUTSIDE = 0.1  # share of a graph's operators that PyTorch may run between programs
_MODES = ("grad_enabled", "inference_mode", "autocast")


def program_compiler(inductor: Callable[[], Compiled]) -> Compiled:
    """Returns a function that compiles a graph to a program. `inductor`: returns the compiler of
    graphs that have none; the log says why. It takes seconds to import."""

    def compile_graph(gm: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        try:
            return _compiled(gm, inputs)
        except NotImplementedError as why:
            log.info("Inductor compiles a graph that has no program: %s", why)
            return inductor()(gm, inputs)  # type: ignore[no-any-return]

    return compile_graph


def _compiled(gm: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
    if why := _why_none(gm, inputs):
        raise NotImplementedError(why)
    constant = [is_constant(node) for node in gm.graph.find_nodes(op="placeholder")]
    graph = aten_graph(gm, inputs)
    if written := sorted(n.name for n in written_roots(graph.graph) if n.op == "placeholder"):
        raise NotImplementedError(f"it writes to its inputs {', '.join(written)}")
    programs = _Programs(graph, constant)
    outside, operators = programs.runner(inputs).outside, _operators(graph)
    if len(outside) > MOST_OUTSIDE * operators:
        names = ", ".join(sorted({*outside}))
        raise NotImplementedError(
            f"PyTorch would run {len(outside)} of its {operators} operators: {names}"
        )
    return programs


def _why_none(gm: fx.GraphModule, inputs: Sequence[Any]) -> str | None:
    """Returns the reason why a graph has no program, as far as its inputs and functions tell."""
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    if len(tensors) < len(inputs) or any(type(n) is not int for x in tensors for n in x.shape):
        return "it serves different sizes"
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "it records gradients"
    if any(wraps_tensors(x) for x in tensors):
        return "an input is a tensor of a subclass"
    if any(is_fake(x) for x in tensors):
        return "an input has no values yet, such as a weight with a folded batch norm"
    if devices := sorted({str(x.device) for x in tensors if x.device.type != "cpu"}):
        return f"it runs on {', '.join(devices)}"
    if any(mode in str(target) for target in targets(gm) for mode in _MODES):
        return "it switches autocast or the recording of gradients"
    if any(isinstance(module, fx.GraphModule) for module in gm.children()):
        return "it has subgraphs"
    return None


def _operators(gm: fx.GraphModule) -> int:
    return sum(node.op == "call_function" for node in gm.graph.nodes)


class _Programs:
    """A compiled graph: a program for each set of constants that it is called with. A constant that
    is written to keeps its address, and its program."""

    def __init__(self, gm: fx.GraphModule, constant: Sequence[bool]) -> None:
        """`gm`: a graph of aten operators. `constant`: whether each input is a parameter, a buffer
        or a packed weight."""
        self._gm = gm
        self._constant = [i for i, kept in enumerate(constant) if kept]
        self._given = [i for i, kept in enumerate(constant) if not kept]
        self._known: dict[tuple[int, ...], tuple[Runner, list[weakref.ref[Tensor]]]] = {}

    def __call__(self, *arguments: Tensor) -> tuple[Any, ...]:
        return tuple(self.runner(arguments)(*[_plain(arguments[i]) for i in self._given]))

    def runner(self, arguments: Sequence[Tensor]) -> Runner:
        """Returns the program for the constants among the arguments. A program keeps the memory of
        its constants, so their addresses identify them."""
        key = tuple([arguments[i].data_ptr() for i in self._constant])
        if (found := self._known.get(key)) is not None:
            return found[0]
        constants = {i: arguments[i] for i in self._constant}
        with torch.no_grad():
            runner = build(_bound(self._gm, constants), [arguments[i] for i in self._given])
        alive = {k: known for k, known in self._known.items() if _is_alive(k, known[1])}
        self._known = {**alive, key: (runner, [weakref.ref(t) for t in constants.values()])}
        return runner


def _is_alive(addresses: Sequence[int], tensors: Sequence[weakref.ref[Tensor]]) -> bool:
    """Whether all of these tensors exist and are still at these addresses."""
    found = [tensor() for tensor in tensors]
    return all(
        tensor is not None and tensor.data_ptr() == address
        for tensor, address in zip(found, addresses, strict=True)
    )


def _bound(gm: fx.GraphModule, constants: dict[int, Tensor]) -> fx.GraphModule:
    """Returns a copy of the graph in which these inputs, by position, are buffers."""
    copy = clone(gm)
    for i, node in enumerate(list(copy.graph.find_nodes(op="placeholder"))):
        if i in constants:
            copy.register_buffer(f"input_{i}", constants[i].detach(), persistent=False)
            with copy.graph.inserting_before(node):
                constant = copy.graph.get_attr(f"input_{i}")
            constant.meta = dict(node.meta)
            node.replace_all_uses_with(constant)
            copy.graph.erase_node(node)
    copy.recompile()
    return copy


def _plain(x: Tensor) -> Tensor:
    return x.resolve_neg().contiguous()
