"""Replaces attention that a model computes by matmuls and a softmax with one operator that reads
the int8 cache.

BLOOM, MPT, GPT-J, CodeGen and XGLM multiply queries by all keys, add masks and slopes, apply a
softmax and multiply the result by all values. In the graph of a step this is rewritten:

    softmax(scale q k^T + bias) v   ->   kv_attention(q, cache, bias, scale)

Attention whose scores the graph computes in another way is not changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from qfx.generate.added_scores import Cached, ScoreReader, Scores, UnknownScores
from qfx.generate.float32_steps import is_check
from qfx.graph.capture import value
from qfx.host.operators import SOFTMAX

aten, ops = torch.ops.aten, torch.ops.qfx
_PRODUCTS = (aten.matmul.default, aten.bmm.default)
# Operators that return the elements of one tensor, possibly in another shape.
_SAME = (
    aten.view.default, aten.reshape.default, aten.to.dtype, aten.contiguous.default,
    aten.clone.default, aten.alias.default, aten.detach.default, aten.expand.default,
)  # fmt: skip


def read_codes(gm: fx.GraphModule) -> None:
    """Rewrites the attention in the graph of a step as described above, so that it reads the int8
    codes of the cache. A mask that several layers compute is computed once."""
    for node in reversed(list(gm.graph.nodes)):
        if node.target is aten.dropout.default and node.args[2] is False:
            node.replace_all_uses_with(node.args[0])
        if is_check(node) or (node.target is aten.dropout.default and not node.users):
            gm.graph.erase_node(node)
    writing = _Writing(gm)
    for node in gm.graph.nodes:
        try:
            if node.target in SOFTMAX and _is_of_last_axis(node):
                writing.attention(node)
            elif node.target is aten.scaled_dot_product_attention.default:
                writing.mask(node)
        except UnknownScores:
            continue
    gm.graph.eliminate_dead_code()
    for node in gm.graph.find_nodes(op="call_function", target=aten.detach_.default):
        if not node.users:  # left over from a number in a mask
            gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()


def _is_of_last_axis(node: fx.Node) -> bool:
    return node.args[1] in (-1, value(node).ndim - 1)


class _Writing:
    def __init__(self, gm: fx.GraphModule) -> None:
        self._gm, self._reader = gm, ScoreReader()
        self._made: dict[Any, fx.Node | None] = {}

    def attention(self, softmax: fx.Node) -> None:
        """Replaces the attention around this softmax by one call. Raises UnknownScores if its
        scores have another form."""
        scores, last = self._reader.scores(softmax.args[0]), _product_of(softmax)
        if scores.product is None or scores.scale <= 0:
            raise UnknownScores
        query, keys = scores.product
        values = Cached.of(last.args[1], ops.kv_values.default, transposed=False)
        if keys.call.args[2:] != values.call.args[2:]:
            raise UnknownScores
        _check_unwritten(keys.call, last)
        cache = (*keys.call.args[:2], *values.call.args[:2])
        length, dtype, *table = keys.call.args[2:]
        shape = (*keys.sizes[:2], *value(query).shape[-2:])
        with self._gm.graph.inserting_before(last):
            mask = self._bias(scores, keys.sizes[:2], query)
            rest = (mask, scores.scale, length, dtype, *table)
            y = self._call(ops.kv_attention.default, self._shaped(query, shape), *cache, *rest)
            last.replace_all_uses_with(self._shaped(y, tuple(value(last).shape)))

    def mask(self, node: fx.Node) -> None:
        """Replaces the float32 mask of `node`, a scaled_dot_product_attention, if the graph
        computes this mask from a bool input. The replacement is the bool input, or its sum with the
        other terms of the mask, which is computed once for all layers."""
        mask = node.args[3] if len(node.args) > 3 else None
        if not isinstance(mask, fx.Node) or value(mask).dtype != torch.float32:
            return
        scores = self._reader.scores(mask)
        if scores.product is not None or not scores.seen:
            raise UnknownScores
        with self._gm.graph.inserting_before(node):
            node.update_arg(3, self._bias(scores, tuple(value(node).shape[:2]), node))

    def _bias(self, scores: Scores, heads: tuple[int, ...], at: fx.Node) -> fx.Node | None:
        """Returns the term that is added to the scores, [B or 1, H or 1, T or 1, L]: float32, or
        bool if it is only a mask; None if nothing is added."""
        if len(scores.seen) > 1:
            raise UnknownScores
        key = (scores.seen, tuple((id(t.operand), t.factor) for t in scores.terms))
        if key not in self._made:
            self._made[key] = self._added(scores, heads, at)
        return self._made[key]

    def _added(self, scores: Scores, heads: tuple[int, ...], at: fx.Node) -> fx.Node | None:
        constant: Any = 0
        parts: list[fx.Node] = []
        for operand, factor in scores.terms:
            if isinstance(operand, Tensor):
                constant = constant + factor * _of_heads(operand, heads).float()
            else:
                part = self._shaped(operand, tuple(_of_heads(value(operand), heads).shape))
                parts.append(part if factor == 1 else self._call(aten.mul.Tensor, part, factor))
        if isinstance(constant, Tensor):
            name = f"added_scores_{len(self._made)}"
            self._gm.register_buffer(name, constant.contiguous(), persistent=False)
            parts.append(self._gm.graph.get_attr(name))
            parts[-1].meta["val"] = value(at).new_empty(constant.shape)
        if not parts:
            return scores.seen[0] if scores.seen else None
        if scores.seen:  # 0 for visible keys and -inf for hidden ones
            seen = self._call(aten.to.dtype, scores.seen[0], torch.float32)
            inverse = self._call(aten.reciprocal.default, seen)
            parts.append(self._call(aten.rsub.Scalar, inverse, 1))
        whole = parts[0]
        for part in parts[1:]:
            whole = self._call(aten.add.Tensor, whole, part)
        return whole

    def _call(self, target: Any, *args: Any) -> fx.Node:
        node = self._gm.graph.call_function(target, args)
        node.meta["val"] = target(*fx.map_arg(args, value))
        return node

    def _shaped(self, node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        if tuple(value(node).shape) == shape:
            return node
        return self._call(aten.reshape.default, node, list(shape))


def _product_of(softmax: fx.Node) -> fx.Node:
    """Returns the matmul of the softmax and the values. Raises UnknownScores if other nodes also
    use the softmax."""
    node = softmax
    while True:
        if len(node.users) != 1:
            raise UnknownScores
        (user,) = node.users
        if user.target in _PRODUCTS:
            if user.args[0] is not node:
                raise UnknownScores
            return user
        if user.target not in _SAME:
            raise UnknownScores
        if value(user).shape[-2:] != value(softmax).shape[-2:]:
            raise UnknownScores
        node = user


def _check_unwritten(read: fx.Node, last: fx.Node) -> None:
    """Raises UnknownScores if the cache is written between the nodes `read` and `last`."""
    node = read
    while node is not last:
        node = node.next
        if node.target is ops.kv_write.default and read.args[0] in node.args:
            raise UnknownScores


def _of_heads(term: Tensor, heads: tuple[int, ...]) -> Tensor:
    """Reshapes a term of scores, [B * H, T, L] or [B, H, T, L] with axes of size 1 allowed, so that
    it broadcasts to [B, H, T, L]."""
    batch, count = heads
    if term.ndim == 3 and term.shape[0] == batch * count:
        return term.reshape(batch, count, *term.shape[1:])
    if term.ndim > 4 or term.ndim == 0:
        raise UnknownScores
    return term.reshape((1,) * (4 - term.ndim) + tuple(term.shape))
