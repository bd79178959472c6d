"""Layouts: channels stay last in memory from one int8 convolution to the next.

An int8 convolution returns its channels last, and the canonical form copies them into the layout
that the float convolution had. This pass removes the copy where nothing on the way to the next
convolution or linear asks how a tensor lies in memory; before a node that may ask, such as `view`,
the former layout is restored:

    contiguous(y) -> relu -> conv         becomes  y -> relu -> conv
    contiguous(y) -> relu -> view         stays
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from qfx.graph.capture import graphs, value
from qfx.graph.patterns import called
from qfx.host.nodes import is_erased
from qfx.host.shapes import hint
from qfx.rewriting.canonical import finish
from qfx.rewriting.erasing import erase

aten, ops = torch.ops.aten, torch.ops.qfx
_COPY = aten.contiguous  # as `emit_view` calls it, and no captured graph does
_READERS = {  # that gain: the last is another copy, after which the layout is the former one
    ops.conv_dynamic.default, ops.conv_depthwise.default, ops.im2col.default,
    ops.linear_dynamic.default, ops.linears.default, ops.quantize.default,
    ops.rotate.default, _COPY,
}  # fmt: skip
# Functions and methods, without the suffix of in-place ones, whose results do not depend on how
# their operands lie in memory.
_INDIFFERENT = frozenset(
    [
        "relu",
        "relu6",
        "gelu",
        "silu",
        "sigmoid",
        "tanh",
        "hardswish",
        "hardsigmoid",
        "hardtanh",
        "leaky_relu",
        "elu",
        "selu",
        "celu",
        "mish",
        "softplus",
        "prelu",
        "rrelu",
        "sin",
        "cos",
        "exp",
        "pow",
        "sqrt",
        "rsqrt",
        "square",
        "reciprocal",
        "abs",
        "neg",
        "clamp",
        "clip",
        "clamp_min",
        "add",
        "sub",
        "mul",
        "div",
        "truediv",
        "iadd",
        "isub",
        "imul",
        "itruediv",
        "true_divide",
        "maximum",
        "minimum",
        "where",
        "softmax",
        "dropout",
        "feature_dropout",
        "dropout2d",
        "dropout1d",
        "alpha_dropout",
        "stochastic_depth",
        "batch_norm",
        "instance_norm",
        "group_norm",
        "layer_norm",
        "normalize",
        "local_response_norm",
        "max_pool1d",
        "max_pool2d",
        "max_pool3d",
        "_max_pool1d",
        "_max_pool2d",
        "_max_pool3d",
        "avg_pool1d",
        "avg_pool2d",
        "avg_pool3d",
        "adaptive_avg_pool1d",
        "adaptive_avg_pool2d",
        "adaptive_avg_pool3d",
        "adaptive_max_pool1d",
        "adaptive_max_pool2d",
        "lp_pool2d",
        "boolean_dispatch",
        "interpolate",
        "upsample",
        "pad",
        "cat",
        "concat",
        "mean",
        "sum",
        "amax",
        "amin",
        "std",
        "var",
        "to",
        "float",
        "half",
        "bfloat16",
        "type",
        "contiguous",
        "clone",
        "permute",
        "slice",
        "transpose",
        "movedim",
        "swapaxes",
        "swapdims",
        "flatten",
        "reshape",
        "getitem",
        "unsqueeze",
        "squeeze",
        "chunk",
        "split",
        "narrow",
        "flip",
        "roll",
        "expand",
        "linear",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
    ]
)
_SIZES = frozenset(["size", "dim", "ndim", "shape", "numel", "getattr"])


def keep_channels_last(gm: fx.GraphModule) -> None:
    """Removes copies of the results of convolutions that nothing needs, in `gm` and the subgraphs
    of its higher-order operators."""
    changed = [graph for graph in graphs(gm) if any([_remove(copy) for copy in _copies(graph)])]
    finish(gm, changed)


def _copies(graph: fx.Graph) -> Iterator[fx.Node]:
    for node in list(graph.nodes):
        if (
            not is_erased(node)
            and called(node) is _COPY
            and len(node.all_input_nodes[0].users) == 1
        ):
            yield node


def _remove(copy: fx.Node) -> bool:
    """Removes one copy, if a convolution or linear reads the result without it; returns whether it
    did."""
    reached = _reached(copy)
    asking = {node: list(_asking(node, reached)) for node in reached}
    gains = any(called(user) in _READERS for node in reached for user in node.users)
    orders = {node: _order(node) for node, users in asking.items() if users}
    if not gains or None in orders.values() or asking[copy]:
        return False
    for node, order in orders.items():
        _restore(node, order, asking[node])  # type: ignore[arg-type]
    (source,) = copy.all_input_nodes
    copy.replace_all_uses_with(source)
    source.meta = copy.meta | source.meta  # what is known of the result
    erase(copy.graph, copy, down_to={source})
    return True


def _reached(copy: fx.Node) -> dict[fx.Node, None]:
    """Returns the nodes whose results may lie in memory in another way without the copy, itself
    included."""
    reached, pending = {copy: None}, [copy]
    while pending:
        for user in pending.pop().users:
            if _passes(user) and user not in reached:
                reached[user] = None
                pending.append(user)
    return reached


def _passes(node: fx.Node) -> bool:
    return called(node) not in _READERS and is_indifferent(node)


def is_indifferent(node: fx.Node) -> bool:
    """Whether a node computes the same however its operands lie in memory, and its result lies as
    they do."""
    return _name(node) in _INDIFFERENT


def _asking(node: fx.Node, reached: dict[fx.Node, None]) -> Iterator[fx.Node]:
    """Yields the readers of a node that may ask how its result lies in memory."""
    for user in node.users:
        if user not in reached and called(user) not in _READERS and _name(user) not in _SIZES:
            yield user


def _order(node: fx.Node) -> tuple[int, ...] | None:
    """Returns the axes of the captured result, the one with the largest stride first; None if they
    are not known, or the result is no single tensor or has elements that overlap."""
    found = value(node)
    if not isinstance(found, Tensor):
        return None
    strides = [hint(stride) for stride in found.stride()]
    if any(stride is None or stride == 0 for stride in strides):
        return None
    axes = range(found.ndim)
    return tuple(sorted(axes, key=lambda axis: -strides[axis]))  # type: ignore[operator]


def _restore(node: fx.Node, order: tuple[int, ...], users: list[fx.Node]) -> None:
    """Gives the result of `node` the captured layout where `users` read it."""
    graph, back = node.graph, tuple(order.index(axis) for axis in range(len(order)))
    plain = order == tuple(range(len(order)))
    with graph.inserting_after(node):
        made = node if plain else graph.call_function(aten.permute, (node, list(order)))
    with graph.inserting_after(made):
        made = graph.call_function(_COPY, (made,))
    if not plain:
        with graph.inserting_after(made):
            made = graph.call_function(aten.permute, (made, list(back)))
    for user in users:
        user.replace_input_with(node, made)


def _name(node: fx.Node) -> str:
    """Returns the name of the function or method that a node calls, without the suffix of in-place
    methods and the name of an overload; "" for other nodes."""
    if node.op not in ("call_function", "call_method"):
        return ""
    if node.target is operator.getitem:
        return "getitem"
    target: Any = node.target
    named = str(getattr(target, "__name__", target)).partition(".")[0]
    return named.strip("_")
