"""The gate between the two products of a block of experts in a graph, found by trying the nodes
between them on values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from qfx.graph.capture import value
from qfx.graph.patterns import calls
from qfx.host.tensors import tree_leaves
from qfx.ops.expert_gates import ExpertGate, gate_like

_aten = torch.ops.aten
_CASTS = (".to", ".float", ".half", ".bfloat16", ".type_as", ".contiguous", _aten.to.dtype)


class NoBlock(Exception):
    """Two products are not those of one block of experts; the message says why."""


def uncast(node: Any) -> Any:
    """Returns the node of which `node` is a copy in another dtype, or `node` itself."""
    while calls(node, *_CASTS):
        node = node.args[0]
    return node


def behind_casts(node: fx.Node) -> fx.Node:
    """Returns the last of the copies of `node` in other dtypes that are its only users."""
    while len(node.users) == 1 and calls(user := next(iter(node.users)), *_CASTS):
        node = user
    return node


def shape_of(node: fx.Node) -> tuple[Any, ...]:
    """Returns the shape of a tensor of the graph. Raises NoBlock if the capture did not record
    it."""
    found = value(node)
    if not isinstance(found, Tensor):
        raise NoBlock(f"the shape of {node} is not known")
    return tuple(found.shape)


def gate_between(u: fx.Node, h: fx.Node) -> ExpertGate:
    """Returns the gate by which `h` [R, I] is computed from outputs `u` of the first product.
    Raises NoBlock if it is none, or if `h` depends on anything else."""
    wide, narrow = (shape_of(node)[-1] for node in (u, h))
    if wide not in (narrow, 2 * narrow):
        raise NoBlock(f"{wide} outputs of a product become {narrow} inputs of the next")
    nodes = [*reversed(list(_between(u, h)))]
    numbers = tree_leaves([(node.args, node.kwargs) for node in nodes])
    limits = {float(n) for n in numbers if isinstance(n, int | float) and math.isfinite(n)}

    def between(values: Tensor) -> Tensor:
        made: dict[fx.Node, Any] = {u: values.clone()}
        for node in nodes:
            made[node] = made[uncast(node)] if calls(node, *_CASTS) else _run(node, made)
        found: Tensor = made[h]
        return found

    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            found = gate_like(between, wide != narrow, sorted(limits), int(wide))
    except Exception as why:  # of code that qfx does not know
        raise NoBlock(f"what lies between its products could not be tried: {why!r}") from why
    if found is None:
        raise NoBlock("the operator for a whole block has no such gate or activation")
    return found


def _between(u: fx.Node, h: fx.Node) -> Iterator[fx.Node]:
    """Yields the nodes from which `h` is computed, after `u`, the last one first."""
    needed, node = {h}, h
    while node is not u:
        if node in needed:
            if node.op not in ("call_function", "call_method"):
                raise NoBlock(f"what lies between its products reads {node}")
            needed.update(node.all_input_nodes)
            yield node
        node = node.prev
        if node.op == "root":
            raise NoBlock("its two products do not follow each other")
    if before := sorted(str(node) for node in needed - {u} if node < u):
        raise NoBlock(f"what lies between its products reads {before[0]}")


def _run(node: fx.Node, made: dict[fx.Node, Any]) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda a: made[a])
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    target: Any = node.target
    return target(*args, **kwargs)
