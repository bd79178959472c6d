"""Constant indices: x[..., [i], :] with a known i becomes a copy of a slice, which programs
support."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten


def slice_constant_indices(gm: fx.GraphModule) -> None:
    """Replaces indexing with a constant, such as x[..., [-2], :], by a slice and a copy, if it is
    on one axis and with one number. Programs have instructions for these, but not for the index."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.index.Tensor):
        indices: Any = node.args[1]
        axes = [axis for axis, index in enumerate(indices) if index is not None]
        number = _known(gm, indices[axes[0]]) if len(axes) == 1 else None
        if number is None:
            continue
        with gm.graph.inserting_before(node):
            end = number + 1 if number != -1 else 2**63 - 1
            part = gm.graph.call_function(aten.slice.Tensor, (node.args[0], axes[0], number, end))
            copy = gm.graph.call_function(aten.clone.default, (part,))
        copy.meta = dict(node.meta)
        node.replace_all_uses_with(copy)
        gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()


def _known(gm: fx.GraphModule, node: fx.Node) -> int | None:
    """Returns the number in an index that is a literal of the model's code, such as `[-2]`: an
    int64 constant of shape [1]. Returns None for other nodes, and for a buffer, because it may
    change."""
    if node.target is not aten.lift_fresh_copy.default:
        return None
    while node.target in (aten.lift_fresh_copy.default, aten.detach_.default):
        node = node.args[0]  # type: ignore[assignment]
    if node.op != "get_attr":
        return None
    value: Any = gm
    for name in str(node.target).split("."):
        value = getattr(value, name, None)
    plain = isinstance(value, Tensor) and not isinstance(value, torch.nn.Parameter)
    plain = plain and value.shape == (1,) and value.dtype == torch.int64
    return int(value) if plain else None
