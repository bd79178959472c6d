"""Bodies (subgraphs) of higher-order operators such as cond and checkpoint, and which of their
placeholders are constants of the model.

A body is a graph of its own whose placeholders are the operands of the call. `link` records for
each placeholder which constant of the model it stands for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import fx

from qfx.graph.calls import HigherOrderCall, calls, inputs
from qfx.graph.capture import OUTER, is_constant, value
from qfx.graph.writes import written_roots
from qfx.host.tensors import tree_leaves

RECORDS = "qfx_records"  # metadata of a body: gradients of its outputs are recorded outside


class Given(NamedTuple):
    """The operand that one call passes to a placeholder of a body (subgraph)."""

    call: HigherOrderCall
    operand: fx.Node


def link(gm: fx.GraphModule) -> None:
    """Records at the placeholders of all bodies which constants of the model they stand for, if
    any.

    A placeholder of a body that is called several times is a constant only if every call passes
    one.
    """
    given: dict[fx.Node, list[Given | None]] = {}
    written = written_roots(gm.graph)
    for call in calls(gm):
        for body in call.bodies:
            if gm.meta.get(RECORDS) or _records(call.node):
                body.meta[RECORDS] = True
            for placeholder, operand in zip(inputs(body), call.operands, strict=True):
                constant = isinstance(operand, fx.Node) and is_constant(operand)
                usable = constant and operand not in written
                links = given.setdefault(placeholder, [])
                links.append(Given(call, operand) if usable else None)
    for placeholder, links in given.items():
        placeholder.meta[OUTER] = [] if None in links else links
    for body in {id(b): b for call in calls(gm) for b in call.bodies}.values():
        link(body)


def callers(gm: fx.GraphModule) -> dict[fx.Graph, list[HigherOrderCall]]:
    """Returns the graphs of all bodies in `gm`, at any depth, and the calls of each."""
    found: dict[fx.Graph, list[HigherOrderCall]] = {}
    pending = [gm]
    while pending:
        for call in calls(pending.pop()):
            for body in {body.graph: body for body in call.bodies}.values():
                if body.graph not in found:
                    pending.append(body)
                found.setdefault(body.graph, []).append(call)
    return found


def family(
    graph: fx.Graph, calling: Mapping[fx.Graph, list[HigherOrderCall]]
) -> tuple[list[fx.Graph], list[HigherOrderCall]]:
    """Returns the bodies that must have the same placeholders as `graph`, because one call has both
    as bodies, and all calls of these bodies."""
    graphs, found, pending = [graph], dict[fx.Node, HigherOrderCall](), [graph]
    while pending:
        for call in calling[pending.pop()]:
            found[call.node] = call
            new = {body.graph for body in call.bodies}.difference(graphs)
            graphs += new
            pending += new
    return graphs, list(found.values())


def _records(node: fx.Node) -> bool:
    outputs = tree_leaves(value(node))
    return any(getattr(o, "requires_grad", False) for o in outputs)


def siblings(placeholder: fx.Node) -> list[fx.Node]:
    """Returns the placeholders that receive the same operand as `placeholder`, in all bodies of the
    calls that pass it."""
    position = inputs(_owner(placeholder)).index(placeholder)
    links: list[Given] = placeholder.meta[OUTER]
    bodies = {id(b): b for given in links for b in given.call.bodies}.values()
    return [inputs(body)[position] for body in bodies]


def _owner(node: fx.Node) -> fx.GraphModule:
    owner = node.graph.owning_module
    assert owner is not None
    return owner
