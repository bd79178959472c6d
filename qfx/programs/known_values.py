"""Known values: replaces what a graph computes from numbers alone by constants, and operations that
these make trivial by views.

Masks of transformers are made of ranges of positions: mask[:, positions] for all positions, and
combinations with masks that hide nothing.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from qfx.graph.capture import value
from qfx.graph.writes import writes
from qfx.host.operators import OpOverload
from qfx.programs.bytecode import contiguous_strides

aten = torch.ops.aten
_MADE = (
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.full.default,
    aten.ones.default, aten.zeros.default,
)  # fmt: skip
_MOST_ELEMENTS = 1 << 20
_AND = (aten.__and__.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default)


def fold(gm: fx.GraphModule) -> None:
    """Edits the graph, unless a node of it writes to a tensor, which might be a constant or a view
    then. Parameters and buffers are not known: they may change."""
    if any(writes(node) for node in gm.graph.nodes):
        return
    known: dict[fx.Node, Tensor] = {}
    for node in list(gm.graph.nodes):
        found = _computed(node, known)
        if found is not None:
            known[node] = found
        elif node.target is aten.index.Tensor:
            _index_as_view(node, known)
        elif node.target in _AND:
            _without_ones(node, known)
    for node, tensor in known.items():
        if any(user not in known for user in node.users):
            _become_constant(gm, node, tensor)
    gm.graph.eliminate_dead_code()


def _computed(node: fx.Node, known: dict[fx.Node, Tensor]) -> Tensor | None:
    """Returns the value of a node that depends on no input, parameter or buffer."""
    target, given = node.target, node.all_input_nodes
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    if not all(each in known for each in given) or not (given or target in _MADE):
        return None
    if torch.Tag.nondeterministic_seeded in target.tags or not _is_small(node, known):
        return None
    with torch.no_grad():
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: known[n])  # type: ignore[arg-type,return-value]
        found = target(*args, **kwargs)
    return found if isinstance(found, Tensor) else None


def _is_small(node: fx.Node, known: dict[fx.Node, Tensor]) -> bool:
    shape = value(node)
    if not isinstance(shape, Tensor) or shape.device.type != "cpu":
        return False
    sizes = [*shape.shape]
    return all(isinstance(n, int) for n in sizes) and prod(sizes) <= _MOST_ELEMENTS


def _index_as_view(node: fx.Node, known: dict[fx.Node, Tensor]) -> None:
    """Replaces x[i, j, ...] by a reshape if the indices take all elements of x in order."""
    x: Any = node.args[0]
    indices: Any = node.args[1]
    shape = getattr(value(x), "shape", None)
    if shape is None or len(indices) != len(shape) or not all(i in known for i in indices):
        return
    at = [known[i] for i in indices]
    if any(i.dtype != torch.int64 for i in at):
        return
    place = sum(i * step for i, step in zip(at, contiguous_strides(shape), strict=True))
    assert isinstance(place, Tensor)
    every = torch.arange(prod(shape), dtype=torch.int64, device="cpu")
    if torch.equal(place.flatten(), every):
        node.target, node.args = aten.reshape.default, (x, list(place.shape))


def _without_ones(node: fx.Node, known: dict[fx.Node, Tensor]) -> None:
    """Replaces the conjunction of x and a mask that is all True by x."""
    for ones, x in (node.args, node.args[::-1]):
        if not isinstance(x, fx.Node) or not isinstance(ones, fx.Node) or ones not in known:
            continue
        shape = getattr(value(node), "shape", None)
        if known[ones].dtype == value(x).dtype == torch.bool and bool(known[ones].all()):
            node.target, node.args = aten.expand.default, (x, list(shape or ()))
            return


def _become_constant(gm: fx.GraphModule, node: fx.Node, tensor: Tensor) -> None:
    name = f"known_{node.name}"
    gm.register_buffer(name, tensor, persistent=False)
    with gm.graph.inserting_before(node):
        constant = gm.graph.get_attr(name)
    constant.meta = dict(node.meta)
    node.replace_all_uses_with(constant)
