"""Calls of higher-order operators whose bodies are subgraphs, for example checkpoint, cond and
scan.

A body's placeholders are the operands of the call, in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import fx

from qfx.graph.capture import attribute
from qfx.host.operators import HigherOrderOperator


class Convention(NamedTuple):
    """The calling convention of a higher-order operator.

    `bodies`: the positions of its bodies among the arguments. `first`: the position of the first
    operand. If `grouped`, the operands are in lists, and a new operand is added to the last list.
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


class HigherOrderCall(NamedTuple):
    """One call of a higher-order operator whose bodies (subgraphs) qfx may edit."""

    node: fx.Node
    convention: Convention
    bodies: tuple[fx.GraphModule, ...]

    @property
    def operands(self) -> list[Any]:
        given = list(self.node.args[self.convention.first :])
        return [o for group in given for o in group] if self.convention.grouped else given  # type: ignore[union-attr]

    def append(self, operand: fx.Node) -> None:
        """Adds an operand to the call, after all others."""
        *before, last = self.node.args
        if self.convention.grouped:
            assert isinstance(last, list | tuple)
            self.node.args = (*before, type(last)([*last, operand]))
        else:
            self.node.args = (*self.node.args, operand)


def calls(gm: fx.GraphModule) -> Iterator[HigherOrderCall]:
    """Yields the calls in `gm` of higher-order operators that qfx may edit: their calling
    convention is known, and they have as many operands as their bodies have placeholders."""
    return (found for found in map(call, gm.graph.nodes) if found)


def call(node: fx.Node) -> HigherOrderCall | None:
    """Returns the call of a higher-order operator that `node` is, if qfx may edit its bodies;
    otherwise None."""
    known = isinstance(node.target, HigherOrderOperator)
    convention = CONVENTIONS.get(node.target.name()) if known else None  # type: ignore[union-attr]
    if convention is None:
        return None
    bodies = tuple(_body(node.args[i]) for i in convention.bodies)
    found = HigherOrderCall(node, convention, bodies)  # type: ignore[arg-type]
    fits = all(b is not None and len(inputs(b)) == len(found.operands) for b in bodies)
    return found if fits else None


def _body(argument: Any) -> fx.GraphModule | None:
    module = attribute(argument) if isinstance(argument, fx.Node) else None
    return module if isinstance(module, fx.GraphModule) else None


def inputs(gm: fx.GraphModule) -> list[fx.Node]:
    """Returns the placeholders of a graph, in order."""
    return [n for n in gm.graph.nodes if n.op == "placeholder"]
