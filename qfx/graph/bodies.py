"""Bodies of higher-order operators: checkpoint, cond, scan and the like.

A body is a graph of its own whose placeholders are the operands of the call. `link` tells them
which of these are constants of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import fx

from qfx.graph.capture import OUTER, attribute, is_constant, value
from qfx.graph.writes import written_roots
from qfx.host.operators import HigherOrderOperator
from qfx.host.tensors import tree_leaves

RECORDS = "qfx_records"  # metadata of a body: gradients of its outputs are recorded outside


class Convention(NamedTuple):
    """How a higher-order operator is called.

    `bodies`: where its bodies stand among the arguments. `first`: where the operands begin; when
    `grouped` they stand in lists, and a new operand goes to the last list.
    """

    bodies: tuple[int, ...]
    first: int
    grouped: bool


CONVENTIONS = {
    "tag_activation_checkpoint": Convention((0,), 1, False),
    "wrap_activation_checkpoint": Convention((0,), 1, False),
    "wrap": Convention((0,), 1, False),
    "invoke_subgraph": Convention((0,), 2, False),
    "wrap_with_set_grad_enabled": Convention((1,), 2, False),
    "wrap_with_autocast": Convention((4,), 5, False),
    "cond": Convention((1, 2), 3, True),
    "while_loop": Convention((0, 1), 2, True),
    "scan": Convention((0,), 1, True),
    "map_impl": Convention((0,), 1, True),
}


class Call(NamedTuple):
    """One call of a higher-order operator with bodies that qfx may edit."""

    node: fx.Node
    convention: Convention
    bodies: tuple[fx.GraphModule, ...]

    @property
    def operands(self) -> list[Any]:
        given = list(self.node.args[self.convention.first :])
        return [o for group in given for o in group] if self.convention.grouped else given  # type: ignore[union-attr]

    def append(self, operand: fx.Node) -> None:
        """Gives the bodies one more operand, after all others."""
        *before, last = self.node.args
        if self.convention.grouped:
            assert isinstance(last, list | tuple)
            self.node.args = (*before, type(last)([*last, operand]))
        else:
            self.node.args = (*self.node.args, operand)


def calls(gm: fx.GraphModule) -> Iterator[Call]:
    """The calls in `gm` of operators with a known convention whose operands fit their bodies."""
    for node in gm.graph.nodes:
        known = isinstance(node.target, HigherOrderOperator)
        convention = CONVENTIONS.get(node.target.name()) if known else None
        if convention is None:
            continue
        bodies = tuple(_body(node.args[i]) for i in convention.bodies)
        found = Call(node, convention, bodies)  # type: ignore[arg-type]
        if all(b is not None and len(inputs(b)) == len(found.operands) for b in bodies):
            yield found


def _body(argument: Any) -> fx.GraphModule | None:
    module = attribute(argument) if isinstance(argument, fx.Node) else None
    return module if isinstance(module, fx.GraphModule) else None


def inputs(gm: fx.GraphModule) -> list[fx.Node]:
    """The placeholders of a graph, in order."""
    return [n for n in gm.graph.nodes if n.op == "placeholder"]


class Given(NamedTuple):
    """What one call gives a body's placeholder."""

    call: Call
    operand: fx.Node


def link(gm: fx.GraphModule) -> None:
    """Tells the placeholders of all bodies which constant of the model they are, if any.

    A body that is called several times has a constant where every call gives it one.
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


def callers(gm: fx.GraphModule) -> dict[fx.Graph, list[Call]]:
    """The graphs of all bodies under `gm`, and the calls of each."""
    found: dict[fx.Graph, list[Call]] = {}
    pending = [gm]
    while pending:
        for call in calls(pending.pop()):
            for body in {body.graph: body for body in call.bodies}.values():
                if body.graph not in found:
                    pending.append(body)
                found.setdefault(body.graph, []).append(call)
    return found


def family(
    graph: fx.Graph, calling: Mapping[fx.Graph, list[Call]]
) -> tuple[list[fx.Graph], list[Call]]:
    """The bodies that need the same operands as `graph`, and all their calls."""
    graphs, found, pending = [graph], dict[fx.Node, Call](), [graph]
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
    """The placeholders that stand for the same operand in the bodies of the calls that give it."""
    position = inputs(_owner(placeholder)).index(placeholder)
    links: list[Given] = placeholder.meta[OUTER]
    bodies = {id(b): b for given in links for b in given.call.bodies}.values()
    return [inputs(body)[position] for body in bodies]


def _owner(node: fx.Node) -> fx.GraphModule:
    owner = node.graph.owning_module
    assert owner is not None
    return owner
