"""Repeated heads: finds the tensor whose heads a node repeats, as models do if queries share keys.

x[:, :, None].expand(-1, -1, G, -1, -1).reshape(B, H * G, N, D)   and   x.repeat_interleave(G, 1)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from qfx.graph.capture import value
from qfx.host.tensors import statically

# The first spellings are Dynamo's, those of aten are export's.
aten = torch.ops.aten
_JOINS: tuple[Any, ...] = ("reshape", "view", "flatten", torch.reshape, torch.flatten)
_JOINS += (aten.reshape.default, aten.view.default, aten.flatten.using_ints)
_EXPANDS: tuple[Any, ...] = ("expand", "broadcast_to", torch.broadcast_to)
_EXPANDS += (aten.expand.default, aten.broadcast_to.default)
_INSERTS = ("unsqueeze", torch.unsqueeze, operator.getitem, aten.unsqueeze.default)
_INTERLEAVES = ("repeat_interleave", torch.repeat_interleave, aten.repeat_interleave.self_int)


def repeated(node: fx.Node) -> tuple[fx.Node, int]:
    """Returns (x [*B, H, N, D], G) for a node [*B, H * G, N, D] that has each head of x G times in
    a row; for any other node the node itself and 1."""
    x = _behind_interleave(node) or _behind_views(node)
    if x is None:
        return node, 1
    heads, source = (value(n).shape[-3] for n in (node, x))
    if not isinstance(heads, int) or not isinstance(source, int):
        return node, 1
    return x, heads // source


def forget(node: fx.Node, source: fx.Node) -> None:
    """Erases the nodes that repeated `source`, unless another node reads them."""
    while node is not source and not node.users:
        before = node.args[0]
        assert isinstance(before, fx.Node)
        node.graph.erase_node(node)
        node = before


def _behind_interleave(node: fx.Node) -> fx.Node | None:
    x = _source(node, _INTERLEAVES)
    if x is None or not _alike(value(x).shape[:-3], value(node).shape[:-3]):
        return None
    times, dim = (
        node.args[i] if len(node.args) > i else node.kwargs.get(name)
        for i, name in ((1, "repeats"), (2, "dim"))
    )
    of_heads = dim in (-3, value(x).ndim - 3) and isinstance(times, int)
    return x if of_heads and _alike(value(x).shape[-2:], value(node).shape[-2:]) else None


def _behind_views(node: fx.Node) -> fx.Node | None:
    expanded = _source(node, _JOINS)
    inserted = expanded and _source(expanded, _EXPANDS)
    x = inserted and _source(inserted, _INSERTS)
    if expanded is None or inserted is None or x is None or not _plain(inserted):
        return None
    *batch, heads, n, d = value(x).shape
    group = value(expanded).shape[-3] if value(expanded).ndim > 3 else 0
    shapes = {
        inserted: (*batch, heads, 1, n, d),
        expanded: (*batch, heads, group, n, d),
        node: (*batch, heads * group, n, d),
    }
    return x if all(_alike(value(n).shape, shape) for n, shape in shapes.items()) else None


def _source(node: fx.Node, targets: tuple[Any, ...]) -> fx.Node | None:
    """Returns the first argument of a call of one of `targets`, if it and the result are tensors
    with at least three axes."""
    if node.op not in ("call_function", "call_method") or node.target not in targets:
        return None
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    known = [value(n) for n in (node, source)]
    return source if all(isinstance(t, Tensor) and t.ndim >= 3 for t in known) else None


def _plain(node: fx.Node) -> bool:
    """Whether a node does not index, or indexes without selecting elements."""
    if node.target is not operator.getitem:
        return True
    index = node.args[1]
    return isinstance(index, tuple) and all(i in (None, ..., slice(None)) for i in index)


def _alike(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(statically(m == n) for m, n in zip(a, b, strict=True))
