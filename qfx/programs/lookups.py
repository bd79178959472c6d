"""Lookups: rewrites other ways of taking rows out of a table as embeddings, for which programs have
an instruction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from qfx.graph.capture import value

aten = torch.ops.aten


def as_embeddings(gm: fx.GraphModule) -> None:
    """Edits the graph. x[i] and x.index_select(0, i) for x [N, K], and a gather of its rows for
    each sequence, become embedding(x, i), which does not accept negative numbers. embedding(x, i +
    c) becomes embedding(x[c:], i)."""
    for node in gm.graph.nodes:
        found = _TABLES[node.target](node) if node.target in _TABLES else None
        if found is not None:
            _replace(node, *found)
    for node in gm.graph.find_nodes(op="call_function", target=aten.embedding.default):
        _shift(node)
    gm.graph.eliminate_dead_code()


def _replace(node: fx.Node, table: fx.Node, numbers: fx.Node) -> None:
    with node.graph.inserting_before(node):
        found = node.graph.call_function(aten.embedding.default, (table, numbers))
    found.meta = dict(node.meta)
    node.replace_all_uses_with(found)
    node.graph.erase_node(node)


def _indexed(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    x, indices = node.args[0], list(node.args[1])  # type: ignore[arg-type]
    return (x, indices[0]) if len(indices) == 1 and _is_table(x, indices[0]) else None  # type: ignore[return-value]


def _selected(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    x, axis, index = node.args
    return (x, index) if axis == 0 and _is_table(x, index) else None  # type: ignore[return-value]


def _gathered(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Returns x [N, K] and the row numbers of a gather from x repeated for each sequence by i [B,
    T, 1] repeated K times; None for any other gather."""
    tables, axis, indices = node.args[:3]
    (x, over), (i, along) = _repeated(tables), _repeated(indices)
    if axis != 1 or x is None or i is None or i.target is not aten.unsqueeze.default:
        return None
    numbers: Any = i.args[0]
    if not _is_table(x, numbers) or i.args[1] not in (-1, 2):
        return None
    batch, k = value(i).shape[0], value(x).shape[1]
    return (x, numbers) if over == [batch, 1, 1] and along == [1, 1, k] else None


def _repeated(node: Any) -> tuple[Any, list[int]]:
    if node.target is not aten.repeat.default:
        return None, []
    return node.args[0], list(node.args[1])


def _is_table(x: Any, numbers: Any) -> bool:
    known = [value(n) if isinstance(n, fx.Node) else None for n in (x, numbers)]
    if not all(isinstance(t, Tensor) for t in known):
        return False
    return known[0].ndim == 2 and known[1].dtype == torch.int64  # type: ignore[union-attr]


def _shift(node: fx.Node) -> None:
    views = []
    number: Any = node.args[1]
    while number.target in (aten.view.default, aten.reshape.default):
        views.append(number)
        number = number.args[0]
    if number.target is not aten.add.Tensor or number.kwargs:
        return
    base, more = number.args
    if type(more) is not int or more < 0 or not isinstance(base, fx.Node):
        return
    if value(base).dtype != torch.int64 or value(base).shape != value(number).shape:
        return
    with node.graph.inserting_before(node):
        for view in reversed(views):
            base = node.graph.call_function(view.target, (base, *view.args[1:]))
        table = node.graph.call_function(aten.slice.Tensor, (node.args[0], 0, more))
    node.args = (table, base)


_TABLES = {
    aten.index.Tensor: _indexed,
    aten.index_select.default: _selected,
    aten.gather.default: _gathered,
}
