"""Whole blocks of experts become one call of `experts`.

Their products, each `linear_experts`, are exact in both forms. What lies between and after them is
rounded as (X2) says, in float32 and once at the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from qfx.graph.capture import value
from qfx.graph.faults import at
from qfx.graph.patterns import calls
from qfx.graph.writes import changed_between
from qfx.ops.forms import BLOCK, EXPERTS
from qfx.rewriting.codes import emit, emit_call, inherit
from qfx.rewriting.expert_blocks import ExpertBlock, block_of
from qfx.rewriting.gate_regions import NoBlock
from qfx.rewriting.notation import OF_MODEL, Notes

_OFFSETS = EXPERTS.names.index("offsets")


def fuse_experts(graph: fx.Graph, notes: Notes) -> None:
    """Replaces blocks of experts by one call each. `notes`: receives why products stay alone. The
    caller checks and recompiles the graph."""
    for products in _of_same_rows(graph):
        with at(products[0]):
            try:
                _emit(graph, _unchanged(block_of(*_two(products))))
            except NoBlock as why:
                for place in (node.meta.get(OF_MODEL) for node in products):
                    if place is not None:
                        notes[place].append(f"no {BLOCK.name}: {why}")


def _of_same_rows(graph: fx.Graph) -> list[list[fx.Node]]:
    """Returns the products of experts, those with the same offsets together, in order."""
    found: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if calls(node, EXPERTS.operator):
            found.setdefault(node.args[_OFFSETS], []).append(node)
    return [*found.values()]


def _two(products: list[fx.Node]) -> tuple[fx.Node, fx.Node]:
    if len(products) != 2:
        raise NoBlock(f"its rows have {len(products)} products of experts, a block has 2")
    return products[0], products[1]


def _unchanged(block: ExpertBlock) -> ExpertBlock:
    """Returns the block. Raises NoBlock if what it reads may change before its end."""
    read = [block.x, block.index, block.routing, block.up["bias"], block.down["bias"]]
    first = min(block.inner)
    writer = changed_between(first.prev, block.end, [node for node in read if node is not None])
    if writer is not None:
        raise NoBlock(f"{writer} may write to what it reads")
    return block


def _emit(graph: fx.Graph, block: ExpertBlock) -> None:
    up, down, end = block.up, block.down, block.end
    dtype, out_dtype = _dtype(up["x"]), _dtype(end)
    values = {"expert": block.index, "routing": block.routing, "out_dtype": out_dtype}
    values |= {"up": up["weight"], "up_layout": up["layout"], "up_bias": up["bias"]}
    values |= {"down": down["weight"], "down_layout": down["layout"], "down_bias": down["bias"]}
    values |= {"code": up["code"], "down_code": down["code"]} | block.gate._asdict()
    with graph.inserting_before(end):
        values["x"] = _in(graph, block.x, dtype)
        values["expert"] = _in(graph, block.index, torch.int64)
        y = emit_call(graph, BLOCK, values, f"{end.name}_int8")
    y.meta = dict(end.meta)
    inherit(y, block.last)
    end.replace_all_uses_with(y)
    _erase(graph, block.inner)


def _dtype(node: fx.Node) -> torch.dtype:
    found = value(node)
    if found is None:
        raise NoBlock(f"the dtype of {node} is not known")
    return found.dtype  # type: ignore[no-any-return]


def _in(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    same = _dtype(node) == dtype
    return node if same else emit(graph, torch.ops.aten.to.dtype, (node, dtype), f"{node}_cast")


def _erase(graph: fx.Graph, inner: Iterable[fx.Node]) -> None:
    """Removes these nodes, which only read each other."""
    for node in sorted(inner, reverse=True):
        assert not node.users, f"{node} is read by {list(node.users)}"
        graph.erase_node(node)
