"""Attention calls: the operators that replace an attention.

int8_attention(q, k, v)      one operator, because a softmax is between its matmuls
attention_decode(q, k, v)    float, for one query
kv_attention(q, cache)       q in 16 bits, for an int8 cache, whose codes it multiplies
attention_append(q, past_k, k, past_v, v)    if keys and values are a past that grows:
    k = cat([past_k, k], -2), v = cat([past_v, v], -2)  ->  all three in one pass over the past
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from qfx.graph.capture import value
from qfx.graph.writes import writes
from qfx.match.attention import Attention
from qfx.match.repeated_heads import forget, repeated
from qfx.rewriting.codes import emit, inherit

ops = torch.ops.qfx
_CATS = (torch.cat, torch.concat, torch.concatenate, torch.ops.aten.cat.default)


def attend(attention: Attention, decodes: bool, results: dict[fx.Node, fx.Node]) -> fx.Node:
    """Replaces an attention by an operator and returns the node of the result. `decodes`: by one
    of the operators above that read keys and values once. `results`: replacements of earlier
    nodes."""
    _read_sources(attention)
    if decodes and (cache := attention.cache):
        return _of_cache(attention, cache, results)
    if decodes and (grown := _grown(attention)):
        return _append(attention, grown, results)
    target = ops.attention_decode.default if decodes else ops.int8_attention.default
    operands = (attention.query, attention.key, attention.val)
    y = _emitted(attention, target, operands, results)
    _replace(attention.node, y)
    return y


def _read_sources(attention: Attention) -> None:
    """Removes the nodes that repeat heads of keys and values for the attention, which then reads
    the tensors with fewer heads."""
    sources = {attention.key, attention.val}
    for node in attention.node.all_input_nodes:
        source, _ = repeated(node)
        if node not in (*sources, attention.query) and source in sources:
            attention.node.replace_input_with(node, source)
            forget(node, source)


def _emitted(
    attention: Attention,
    target: Any,
    operands: tuple[fx.Node, ...],
    results: dict[fx.Node, fx.Node],
) -> fx.Node:
    node = attention.node
    operands = tuple(results.get(n, n) for n in operands)
    how = (attention.scale, attention.causal, attention.dtype)
    arguments = (*operands, _mask_of(attention, results), *how)
    name = f"{node.name}_{'int8' if target is ops.int8_attention.default else 'decode'}"
    with node.graph.inserting_before(node):
        return emit(node.graph, target, arguments, name)


def _mask_of(attention: Attention, results: dict[fx.Node, fx.Node]) -> fx.Node | None:
    mask = attention.mask
    added = results.get(mask, mask) if mask is not None else None
    return added


def _replace(node: fx.Node, made: fx.Node) -> None:
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)


def _of_cache(
    attention: Attention, cache: tuple[Any, ...], results: dict[fx.Node, fx.Node]
) -> fx.Node:
    node = attention.node
    *tensors, length, table = cache
    query = results.get(attention.query, attention.query)
    tables = () if table is None else (table,)
    rest = (_mask_of(attention, results), attention.scale, length, attention.dtype, *tables)
    with node.graph.inserting_before(node):
        name = f"{node.name}_cached"
        y = emit(node.graph, ops.kv_attention.default, (query, *tensors, *rest), name)
    _replace(node, y)
    for source in (attention.key, attention.val):
        if not source.users:
            source.graph.erase_node(source)
    return y


def _append(
    attention: Attention, grown: tuple[fx.Node, ...], results: dict[fx.Node, fx.Node]
) -> fx.Node:
    operands = (attention.query, *grown)
    parts = _emitted(attention, ops.attention_append.default, operands, results)
    inherit(parts, attention.node)
    replaced = (attention.node, attention.key, attention.val)
    with attention.node.graph.inserting_before(attention.node):
        y, *caches = (
            emit(
                parts.graph, operator.getitem, (parts, i), f"{node.name}_grown" if i else node.name
            )
            for i, node in enumerate(replaced)
        )
    for node, made in zip(replaced, (y, *caches), strict=True):
        _replace(node, made)
    return y


def _grown(attention: Attention) -> tuple[fx.Node, ...] | None:
    """Returns past_k, k, past_v, v if no node reads their concatenations before the attention does,
    and nothing is written in between; otherwise None."""
    key, val, node = attention.key, attention.val, attention.node
    parts = (*_appended(key), *_appended(val))
    if len(parts) != 4 or key is val:
        return None
    position = {n: i for i, n in enumerate(node.graph.nodes)}
    start = min(position[key], position[val])
    others = [user for n in (key, val) for user in n.users if user is not node]
    between = list(node.graph.nodes)[start : position[node]]
    early = any(position[user] < position[node] for user in others)
    return None if early or any(map(writes, between)) else parts


def _appended(node: fx.Node) -> tuple[fx.Node, ...]:
    """Returns the two tensors that a cat joins along the second to last axis, or () for any other
    node."""
    if node.op != "call_function" or node.target not in _CATS or not node.args:
        return ()
    tensors: Any = node.args[0]
    known = [value(n) if isinstance(n, fx.Node) else None for n in (*tensors, node)]
    axis = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    shaped = all(isinstance(t, Tensor) for t in known)
    if not shaped or len(known) != 3 or len({(t.ndim, t.dtype) for t in known}) != 1:  # type: ignore[union-attr]
        return ()
    return tuple(tensors) if axis in (-2, known[0].ndim - 2) else ()  # type: ignore[union-attr]
