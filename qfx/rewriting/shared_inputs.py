"""Shared inputs: linears that quantize the same floats in the same way become one call.

    y = linear_dynamic(x, w, layout, bias, code, act, dtype, factor)        for each w

    every = linears(x, [w, ...], [*layout, ...], [bias, ...], code, [act, ...], dtype, factor)
    y = every[i]

The call replaces the first linear: x is quantized once, and threads share the panels of all
weights. A linear begins another call, and the plan says why, if it reads something that is not
computed yet or that may be written in between. The same holds for a linear that comes much later,
such as cross attention of the next layer, because its result would take memory until then. On a GPU
linears stay separate: Inductor computes their codes, or a launch of its own does.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import fx

from qfx.graph.capture import device
from qfx.graph.faults import at
from qfx.graph.patterns import Bound
from qfx.graph.writes import changed_between, nodes_in_transforms, without_gradients
from qfx.host.tensors import tree_leaves
from qfx.ops.forms import LINEARS
from qfx.rewriting.codes import emit_call, inherit
from qfx.rewriting.notation import OF_MODEL, Notes, pattern

_DYNAMIC = pattern("linear_dynamic(x, weight, layout, bias, code, activation, out_dtype, factor)")
_OF_ALL = ("x", "code", "out_dtype", "factor")
_OF_EACH = ("weight", "bias", "activation")
_BETWEEN = 4  # at most this many other linears between two of one call: a layer has more


class _LinearNode(NamedTuple):
    node: fx.Node
    arguments: Bound

    def read(self, *names: str) -> list[fx.Node]:
        leaves = tree_leaves([self.arguments[name] for name in names])
        return [leaf for leaf in leaves if isinstance(leaf, fx.Node)]


def runs_several(*operands: fx.Node) -> bool:
    """Whether linears with these operands can run as one call of `linears`, which has no kernel for
    GPUs."""
    return all(LINEARS.lacking(device(operand)) is None for operand in operands)


def share_inputs(graph: fx.Graph, notes: Notes) -> None:
    """Replaces linears that quantize the same input in the same way by one call. The caller checks
    and recompiles the graph."""
    for linears in _groups(graph, notes):
        if len(linears) > 1:
            with at(linears[0].node):
                _emit(graph, linears)


def _groups(graph: fx.Graph, notes: Notes) -> list[list[_LinearNode]]:
    """Returns the groups of linears that each become one call. Adds a note for each linear that
    begins another group although an earlier group has the same input."""
    found: list[list[_LinearNode]] = []
    latest: dict[Any, list[_LinearNode]] = {}
    places: dict[fx.Node, int] = {}
    for place, (linear, key) in enumerate(_linears(graph)):
        group, places[linear.node] = latest.get(key), place
        why_not = None
        if group:
            between = place - places[group[-1].node] - 1
            why_not = _why_apart(group[0].node, linear, between)
        if why_not and OF_MODEL in linear.node.meta:
            notes[linear.node.meta[OF_MODEL]].append(f"no {LINEARS.name}: {why_not}")
        if group is None or why_not:
            latest[key] = group = []
            found.append(group)
        group.append(linear)
    return found


def _linears(graph: fx.Graph) -> Iterator[tuple[_LinearNode, Any]]:
    """Yields the linears that one call may run, each with the properties that all linears of a call
    share."""
    inside, silent = nodes_in_transforms(graph), without_gradients(graph)
    for node in graph.nodes:
        arguments = _DYNAMIC.match(node) if _DYNAMIC.starts_at(node) else ""
        if isinstance(arguments, str) or not node.users or node in inside:
            continue
        if runs_several(arguments["x"], arguments["weight"]):
            common = (
                *(arguments[name] for name in ("x", "out_dtype", "factor")),
                *arguments["code"],
            )
            yield _LinearNode(node, arguments), (*common, node in silent)


def _why_apart(first: fx.Node, linear: _LinearNode, between: int) -> str | None:
    """Returns why a linear does not run where the first one of a call does, or None. `between`: the
    number of other linears after the last one of the call."""
    if between > _BETWEEN:
        return f"{between} other linears run between {first} and it"
    own = linear.read("layout", *_OF_EACH)
    for node in own:
        if first < node and node.op != "get_attr":
            return f"{node} comes after {first}"
    writer = changed_between(first, linear.node, own + linear.read(*_OF_ALL))
    return f"{writer} may write to what it reads" if writer else None


def _emit(graph: fx.Graph, linears: Sequence[_LinearNode]) -> None:
    """Adds one call of `linears` that computes all of these linears, and replaces each linear by
    the result of this call that belongs to it, `every[i]`."""
    first, arguments = linears[0], [linear.arguments for linear in linears]
    for linear in linears:
        for node in linear.read("layout", *_OF_EACH):
            if first.node < node:  # a constant
                first.node.prepend(node)
    values = {name: first.arguments[name] for name in _OF_ALL}
    values |= {name: [each[name] for each in arguments] for name in _OF_EACH}
    values["layout"] = [number for each in arguments for number in each["layout"]]
    with graph.inserting_before(first.node):
        every = emit_call(graph, LINEARS, values, f"{first.arguments['x'].name}_linears")
    inherit(every, first.node)
    for i, linear in enumerate(linears):
        linear.node.target, linear.node.kwargs = operator.getitem, {}
        linear.node.args = (every, i)
