"""Residuals: what is added to the result of an int8 convolution, and the activation function after
the addition, become part of its epilogue.

    relu(movedim(conv_dynamic(x, w, ..., "none", dtype), -1, 1) + r)

    movedim(conv_dynamic(x, w, ..., "relu", dtype, factor, movedim(r, 1, -1)), -1, 1)         (E5)

It follows the pass that keeps channels last, because the kernel reads r as its own result lies in
memory: an r that lies in another way would be copied first. Additions after linears, convolutions
of single pixels among them, stay apart: their calls have no dispatcher to pass, which takes longer
than the addition saves (docs/decisions/0049-convolutions-are-linears-of-windows.md).
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from qfx.graph.capture import device, graphs, value
from qfx.graph.faults import at
from qfx.graph.patterns import Bound, called, calls
from qfx.graph.views import View, emit_view
from qfx.graph.writes import changed_between, nodes_in_transforms, written_inputs
from qfx.host.nodes import is_erased
from qfx.host.shapes import expression
from qfx.match.epilogue import activation_after, trains
from qfx.ops.forms import CONV
from qfx.rewriting.canonical import finish
from qfx.rewriting.codes import emit_call, inherit
from qfx.rewriting.erasing import erase
from qfx.rewriting.layouts import is_indifferent
from qfx.rewriting.notation import OF_MODEL, Notes, pattern

aten, ops = torch.ops.aten, torch.ops.qfx
_ADDS = (
    operator.add, operator.iadd, torch.add, ".add", ".add_", aten.add.Tensor, aten.add_.Tensor,
)  # fmt: skip
_CONVOLUTION = pattern(
    "conv_dynamic(x, weight, layout, bias, kernel, stride, padding, dilation, code, activation, "
    "out_dtype, factor)"
)
_LAST: View = (("movedim", (1, -1)),)
_BACK: View = (("movedim", (-1, 1)),)


class _Addition(NamedTuple):
    """An addition of the result of a convolution, `moved`, and `residual`. `y`: the operator;
    `arguments`: its own, by name."""

    add: fx.Node
    moved: fx.Node
    y: fx.Node
    arguments: Bound
    residual: fx.Node


def add_residuals(gm: fx.GraphModule) -> Notes:
    """Changes a graph in place, and returns notes for the plan: which additions stay apart, and
    why."""
    notes: Notes = defaultdict(list)
    changed = []
    for graph in graphs(gm):
        inside = nodes_in_transforms(graph)
        for node in list(graph.nodes):
            if not is_erased(node) and calls(node, *_ADDS) and node not in inside:
                with at(node):
                    changed += [graph] if _add(graph, node, notes) else []
    finish(gm, changed)
    return notes


def _add(graph: fx.Graph, add: fx.Node, notes: Notes) -> bool:
    """Rewrites one addition, if a convolution can compute it; returns whether it did."""
    reasons: Notes = defaultdict(list)
    for found in _additions(add):
        why_not = _why_apart(found)
        if why_not is None:
            _emit(graph, found)
            return True
        if OF_MODEL in found.y.meta:
            reasons[found.y.meta[OF_MODEL]].append(f"no residual: {why_not}")
    for place, words in reasons.items():
        notes[place] += words
    return False


def _additions(add: fx.Node) -> Iterator[_Addition]:
    """Yields the ways to read a node as the addition to a convolution, that of the operand which is
    computed last first: then the other one is there already."""
    if len(add.args) != 2 or add.kwargs or not all(isinstance(a, fx.Node) for a in add.args):
        return
    left, right = cast("tuple[fx.Node, fx.Node]", add.args)
    both = [(left, right), (right, left)]
    for moved, residual in both if right < left else both[::-1]:
        y = _convolution(moved)
        if y is not None and moved is not residual:
            arguments = cast(Bound, _CONVOLUTION.match(y))
            yield _Addition(add, moved, y, arguments, residual)


def _convolution(moved: fx.Node) -> fx.Node | None:
    """Returns the operator of a convolution whose result this is, moved to where its channels were
    and perhaps copied, if nothing else reads it."""
    steps = [moved, *moved.all_input_nodes] if calls(moved, aten.contiguous) else [moved]
    if not calls(steps[-1], aten.movedim) or steps[-1].args[1:] != (-1, 1):
        return None
    (y,) = steps[-1].all_input_nodes
    fits = _CONVOLUTION.starts_at(y) and isinstance(_CONVOLUTION.match(y), dict)
    alone = all(len(node.users) == 1 for node in (*steps, y))
    return y if fits and alone else None


def _why_apart(found: _Addition) -> str | None:
    """Returns why the convolution does not compute the addition, or None."""
    add, moved, y, arguments, residual = found
    if arguments["activation"] != "none":
        return "an activation function comes before it"
    if lacking := CONV.lacking(device(add)):
        return lacking
    if trains(add):
        return "gradients are recorded"
    if residual in written_inputs(add):
        return f"{residual} is written"
    sizes = [_sizes(node) for node in (add, *add.all_input_nodes)]
    if None in sizes:
        return "the sizes are not known"
    if any(each != sizes[0] for each in sizes):
        return "what is added has another shape"
    if not value(add).dtype == value(residual).dtype == arguments["out_dtype"]:
        return f"{value(residual).dtype} is added to {arguments['out_dtype']}"
    for node in (moved, residual):
        if not _lies_last(node):
            return f"the channels of {node} do not lie last in memory"
    writer = changed_between(y, add, y.all_input_nodes)
    return f"{writer} may write to what the convolution reads" if writer else None


def _sizes(node: fx.Node) -> list[Any] | None:
    """Returns the sizes of a node's result, symbolic ones as expressions; None if they are not
    known."""
    found = value(node)
    if not isinstance(found, Tensor):
        return None
    return [expression(n) if isinstance(n, torch.SymInt) else n for n in found.shape]


def _lies_last(node: fx.Node) -> bool:
    """Whether the channels of an image lie last in memory: it comes from a convolution in int8
    without a copy, perhaps through functions of its elements."""
    sizes = _sizes(node)
    while not calls(node, aten.movedim):
        if not is_indifferent(node) or _sizes(node) != sizes:
            return False
        node = node.all_input_nodes[0]
    (source,) = node.all_input_nodes
    return node.args[1:] == (-1, 1) and getattr(called(source), "namespace", "") == "qfx"


def _emit(graph: fx.Graph, found: _Addition) -> None:
    """Adds a convolution that computes the addition and what follows it, and replaces their
    result by its own."""
    add, _, y, arguments, residual = found
    end, activation = activation_after(add) or (add, "none")
    with graph.inserting_before(add):
        values = {**arguments, "activation": activation, "residual": emit_view(_LAST, residual)}
        made = emit_call(graph, CONV, values, f"{y.name}_residual")
        inherit(made, y)
        moved = emit_view(_BACK, made)
    moved.meta = dict(end.meta)
    end.replace_all_uses_with(moved)
    erase(graph, end, down_to={residual})
