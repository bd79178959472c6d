"""Erasing: removes nodes of a graph that nothing reads any more."""

from __future__ import annotations

from torch import fx

from qfx.graph.writes import writes
from qfx.host.nodes import is_erased


def erase(graph: fx.Graph, node: fx.Node, down_to: set[fx.Node]) -> None:
    """Removes a node without users, then its inputs that have become unused, except those in
    `down_to`.

    `Graph.eliminate_dead_code` would delete in-place operations of a Dynamo graph.
    """
    if is_erased(node) or node.users or node in down_to or node.op in ("placeholder", "output"):
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    node.meta.clear()  # the graph still holds the node, and its metadata may refer to parameters
    for source in inputs:
        if not writes(source):
            erase(graph, source, down_to)
