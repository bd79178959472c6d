"""Removal of inputs of a rewritten graph: float weights that no node reads any more."""

from __future__ import annotations

from torch import Tensor, fx

from qfx.rewriting.constants import NewInputs
from qfx.weights.feed import Feed, PackedPart, WeightSource


def drop_unused_inputs(gm: fx.GraphModule, added: NewInputs) -> Feed:
    """Removes the graph inputs that only int8 sites read, and returns where the other inputs come
    from."""
    slots = added.slots
    new = [*(slot.nodes.nodes for slot in slots), tuple(added.constants)]
    parts = {node: PackedPart(s, p) for s, nodes in enumerate(new) for p, node in enumerate(nodes)}
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    position = {n: i for i, n in enumerate(n for n in placeholders if n not in parts)}
    sources = tuple(WeightSource(position[s.weight], s.view, s.packing) for s in slots)
    inputs: list[int | PackedPart] = []
    for node in placeholders:
        if node in parts:
            inputs.append(parts[node])
        elif node.users or not isinstance(node.meta.get("example_value"), Tensor):
            inputs.append(position[node])
        else:
            gm.graph.erase_node(node)
            node.meta.clear()  # the graph still knows the node, and this refers to the parameter
    gm.recompile()
    return Feed(tuple(inputs), sources, tuple(added.constants.values()))
