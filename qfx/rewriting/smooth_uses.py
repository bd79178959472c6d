"""Smooth uses: whether a backward graph may read an activation with the noise of int8.

It may if the gradients are products of what it reads, or smooth functions of it, also of what the
backward graph computes of it again. It may not where a code of zero or one step more changes the
result without a bound: divisors, roots, logarithms, the exponentials of a softmax, comparisons, and
attention.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from math import prod

import torch
from torch import fx

from qfx.graph.capture import value
from qfx.host.shapes import hint

aten, prims = torch.ops.aten, torch.ops.prims
# What returns the values it is given, in another place or dtype, or sums of them.
_SUMS = frozenset((aten.add.Tensor, aten.sub.Tensor))
_PASSING = _SUMS | frozenset(
    (aten.view.default, aten.reshape.default, aten.permute.default, aten.transpose.int,
     aten.t.default, aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim,
     aten.squeeze.dims, aten.squeeze.default, aten.unflatten.int,
     aten.split.Tensor, aten.split_with_sizes.default, aten.flip.default, operator.getitem,
     aten.clone.default, aten.alias.default, aten.slice.Tensor, aten.select.int,
     prims.convert_element_type.default)
)  # fmt: skip
# What a noisy operand makes noisy in proportion, or less.
_SMOOTH = frozenset(
    (aten.mul.Tensor, aten.mul.Scalar, aten.mm.default, aten.bmm.default, aten.addmm.default,
     aten.baddbmm.default, aten.sigmoid.default, aten.tanh.default, aten.erf.default,
     aten.sigmoid_backward.default, aten.tanh_backward.default, aten.silu_backward.default,
     aten.gelu_backward.default, aten.silu.default, aten.gelu.default,
     aten.convolution_backward.default, aten.native_layer_norm_backward.default,
     aten.native_group_norm_backward.default)
)  # fmt: skip
_REDUCTIONS = frozenset((aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default))
# What a value of a row, group or position is computed by, such as the inverse deviation of a norm:
# a row of such values spans orders of magnitude, and each multiplies many others.
_STATISTICS = _REDUCTIONS | frozenset(
    (aten.rsqrt.default, aten.sqrt.default, aten.reciprocal.default, aten.log.default,
     aten.exp.default, aten.amax.default, aten.amin.default, aten.var_mean.correction,
     aten.var.correction, aten.native_layer_norm.default, aten.native_group_norm.default,
     aten.logsumexp.default)
)  # fmt: skip
_MANY = 32  # terms of a mean square, which averages the noise of codes
_GELU = -0.5  # factor of x x in the exponential of a gelu's gradient
_EXPONENTS = (1, 2, 3)  # a root or an inverse is a quotient


class SmoothUses:
    """The uses of activations in a backward graph. `gradients`: its inputs that are gradients."""

    def __init__(self, gradients: Iterable[fx.Node]) -> None:
        self._of_gradients = _dependents(gradients)

    def are_all_of(self, node: fx.Node) -> bool:
        """Whether everything that reads a node is smooth in it, also through what the backward
        graph computes of it again. What has met a gradient is a product with that, and is not
        followed."""
        seen, todo = {node}, [node]
        while todo:
            each = todo.pop()
            for user in each.users:
                if user in seen or _is_mean_square(user) or _is_of_bounded(user):
                    continue
                if user.target not in _PASSING | _REDUCTIONS and not _reads_smoothly(user, each):
                    return False
                if user.target in _PASSING | _REDUCTIONS or user not in self._of_gradients:
                    seen.add(user)
                    todo.append(user)
        return True


def _dependents(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    found, todo = set[fx.Node](), [*nodes]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo.extend(node.users)
    return found


def _reads_smoothly(user: fx.Node, node: fx.Node) -> bool:
    if user.target is aten.pow.Tensor_Scalar:
        return user.args[1] in _EXPONENTS
    if user.target is aten.div.Tensor:
        return user.args[1] is not node
    return user.target in _SMOOTH


def _is_of_bounded(node: fx.Node) -> bool:
    """Whether a node is part of a function that is smooth as a whole: the neg(x) of
    x / (1 + exp(-x)), a silu, or the exponential of -x x / 2 in the gradient of a gelu."""
    if node.target is aten.neg.default:
        return all(_is_of_sigmoid(user) for user in node.users)
    if node.target is not aten.exp.default:
        return False
    (argument,) = node.all_input_nodes
    if argument.target is not aten.mul.Tensor or len(argument.all_input_nodes) != 1:
        return False
    square, factor = argument.args
    return isinstance(square, fx.Node) and _is_square(square) and bool(factor == _GELU)


def _is_mean_square(node: fx.Node) -> bool:
    """Whether a node sums many squares, as a norm does. Other sums may cancel."""
    if node.target not in _REDUCTIONS or not _is_square(node.all_input_nodes[0]):
        return False
    many, few = (prod(map(hint, value(n).shape)) for n in (node.all_input_nodes[0], node))  # type: ignore[arg-type]
    return many >= _MANY * few


def _is_square(node: fx.Node) -> bool:
    if node.target is aten.mul.Tensor:
        return node.args[0] is node.args[1]
    return node.target is aten.pow.Tensor_Scalar and bool(node.args[1] == 2)


def _is_of_sigmoid(node: fx.Node) -> bool:
    return node.target is aten.exp.default and all(_adds_one(user) for user in node.users)


def _adds_one(node: fx.Node) -> bool:
    return node.target is aten.add.Tensor and 1 in node.args[1:]


def is_statistic(node: fx.Node) -> bool:
    """Whether a value is a reduction, or a root, inverse, logarithm or exponential of others."""
    return any(each.target in _STATISTICS for each in sources(node))


def sources(node: fx.Node) -> Iterator[fx.Node]:
    """Yields a node, and the nodes of which it is a view or a conversion."""
    yield node
    while node.target in _PASSING - _SUMS:
        node = node.all_input_nodes[0]
        yield node
