"""Smooth uses: whether a backward graph may read an activation with the noise of int8.

It may if the gradients are products of what it reads, or smooth functions of it. It may not where
a code of zero or one step more changes the result without a bound: divisors, roots, logarithms,
the exponentials of a softmax, comparisons, and attention.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

aten, prims = torch.ops.aten, torch.ops.prims
# What returns the values it is given, in another place or dtype, or sums of them.
_SUMS = frozenset((aten.add.Tensor, aten.sub.Tensor))
_PASSING = _SUMS | frozenset(
    (aten.view.default, aten.reshape.default, aten.permute.default, aten.transpose.int,
     aten.t.default, aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim,
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
_EXPONENTS = (1, 2, 3)  # a root or an inverse is a quotient


def is_smooth(node: fx.Node) -> bool:
    """Whether everything that reads a node, also through views, conversions and sums, is smooth in
    it. A sum that nothing smooth reads is no use."""
    seen, todo = set[fx.Node](), [node]
    while todo:
        each = todo.pop()
        for user in each.users:
            if user.target in _PASSING and user not in seen:
                seen.add(user)
                todo.append(user)
            elif user.target not in _PASSING and not _reads_smoothly(user, each):
                return False
    return True


def _reads_smoothly(user: fx.Node, node: fx.Node) -> bool:
    if user.target is aten.pow.Tensor_Scalar:
        return user.args[1] in _EXPONENTS
    if user.target is aten.div.Tensor:
        return user.args[1] is not node
    if user.target is aten.neg.default:
        return all(_is_of_sigmoid(each) for each in user.users)
    return user.target in _SMOOTH


def _is_of_sigmoid(node: fx.Node) -> bool:
    """Whether a node is the exponential of x / (1 + exp(-x)), a silu."""
    return node.target is aten.exp.default and all(_adds_one(user) for user in node.users)


def _adds_one(node: fx.Node) -> bool:
    return node.target is aten.add.Tensor and 1 in node.args[1:]


def sources(node: fx.Node) -> Iterator[fx.Node]:
    """Yields a node, and the nodes of which it is a view or a conversion."""
    yield node
    while node.target in _PASSING - _SUMS:
        node = node.all_input_nodes[0]
        yield node
