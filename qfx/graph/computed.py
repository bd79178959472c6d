"""Values that a graph computes from constants alone, such as a weight under weight_norm: they are
the same at every call until one of the constants changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from qfx.graph.capture import OUTER, attribute, is_constant, value
from qfx.graph.writes import writes

_MOST = 64  # nodes of a computation
_NEVER = ("rand", "dropout", "bernoulli", "normal", "multinomial", "empty", "print")


def sources_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """Returns the constants that `node` is computed from, in the order of the graph; nothing if it
    is no such value: it is a constant itself, it reads an input, or it may be random."""
    inside = nodes_that_compute(node)
    if not inside or not isinstance(value(node), Tensor):
        return ()
    leaves = {n: None for each in inside for n in each.all_input_nodes if n not in inside}
    return tuple(sorted(leaves))


def nodes_that_compute(node: fx.Node) -> list[fx.Node]:
    """Returns the nodes that compute `node` from constants alone, in order; nothing if it is not
    computed so."""
    inside, pending = {node}, [node]
    while pending and len(inside) <= _MOST:
        each = pending.pop()
        if each.op not in ("call_function", "call_method") or writes(each) or _is_random(each):
            return []
        for source in each.all_input_nodes:
            if is_constant(source) and OUTER not in source.meta:
                continue
            if source not in inside:
                inside.add(source)
                pending.append(source)
    return [] if pending else sorted(inside)


def _is_random(node: fx.Node) -> bool:
    target: Any = node.target
    name = str(getattr(target, "__name__", target))
    return any(word in name for word in _NEVER) or not node.all_input_nodes


def computation_of(node: fx.Node) -> Callable[..., Tensor]:
    """Returns the function of the constants `sources_of(node)` that computes `node`. It refers to
    no node of the graph."""
    graph, sources = fx.Graph(), sources_of(node)
    copies = {source: graph.placeholder(source.name) for source in sources}
    for each in nodes_that_compute(node):
        copies[each] = graph.node_copy(each, lambda n: copies[n])
        copies[each].meta.clear()
    graph.output(copies[node])
    gm = fx.GraphModule(torch.nn.Module(), graph)
    return gm.forward


def evaluated(node: fx.Node, values: Callable[[fx.Node], Tensor] = attribute) -> Tensor:
    """Returns the value of a node that is computed from constants. `values`: of the constants."""
    with torch.no_grad():
        found: Sequence[Tensor] = [values(source) for source in sources_of(node)]
        return computation_of(node)(*found)
