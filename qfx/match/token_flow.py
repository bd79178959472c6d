"""Token flow: what a captured graph computes from token ids alone.

Smoothing factors without data describe a part of a model whose input is token ids. A graph may pass
it something else: embeddings as an input, or what another part computes from an image. Floats that
are only attended to (a cache of keys and values, a mask) do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, fx

from qfx.graph.calls import calls, inputs
from qfx.graph.capture import attribute, is_constant, roots, value
from qfx.graph.writes import written_inputs
from qfx.host.tensors import storage_id, tree_leaves
from qfx.match.attention import Attention
from qfx.match.base import Match
from qfx.match.products import Product
from qfx.match.site import Site

_LOOKUPS = ("embedding", "embedding.default")  # F.embedding and torch.embedding; aten's
_ATTENTIONS = ("scaled_dot_product_attention",)
_INPUT, _COMPUTED = 1, 2  # a float input of the graph; the result of a matmul with one


class Origin(NamedTuple):
    """The inputs from which a node is computed. `ids`: an integer input of the graph. `tables`: the
    storages of the embeddings in which such inputs were looked up. `floats`: 0, or `_INPUT` or
    `_COMPUTED`."""

    ids: bool = False
    tables: frozenset[int | None] = frozenset()
    floats: int = 0

    def __or__(self, other: Origin) -> Origin:  # type: ignore[override]
        floats = max(self.floats, other.floats)
        return Origin(self.ids or other.ids, self.tables | other.tables, floats)


_NOTHING = Origin()


def why_not_from_ids(
    gm: fx.GraphModule, matches: Sequence[Match], storages: Mapping[str, int | None]
) -> Callable[[Site, int | None], str]:
    """Returns a function of a matmul and of the storage of an embedding. This function returns ''
    if the input of the matmul is computed only from ids that are looked up in this embedding,
    otherwise the reason why not.

    `storages`: the storages of the graph's inputs, by name.
    """
    flow = _Flow({m.node: m for m in matches}, storages)
    while flow.sweep(gm):
        pass

    def why_not(site: Site, table: int | None) -> str:
        origin = flow.origins.get(site.x, _NOTHING)
        if origin.floats:
            return "it depends on a float input of the graph"
        return "" if table in origin.tables else "it is not computed from token ids of the graph"

    return why_not


class _Flow:
    """The origins of all nodes of a graph and of the subgraphs of its higher-order operators. They
    are found by repeated sweeps: a node that is written in place, and a subgraph that is called
    twice, have several origins."""

    def __init__(
        self, matches: Mapping[fx.Node, Match], storages: Mapping[str, int | None]
    ) -> None:
        self.matches, self.storages = matches, storages
        self.origins: dict[fx.Node, Origin] = {}

    def sweep(self, gm: fx.GraphModule, outermost: bool = True) -> bool:
        """Updates all origins once and returns whether one has grown."""
        bodies, grown = {call.node: call for call in calls(gm)}, False
        for node in gm.graph.nodes:
            found = _of_input(node) if outermost and node.op == "placeholder" else self._of(node)
            if node in bodies:
                call = bodies[node]
                for body in call.bodies:
                    for placeholder, operand in zip(inputs(body), call.operands, strict=True):
                        if isinstance(operand, fx.Node):
                            grown |= self._add(placeholder, self.origins[operand])
                    grown |= self.sweep(body, outermost=False)
                    found |= self._joined(body.graph.output_node().all_input_nodes)
            grown |= self._add(node, found)
            for written in written_inputs(node):
                for each in _bases(written):
                    grown |= self._add(each, found)
        return grown

    def _add(self, node: fx.Node, found: Origin) -> bool:
        before = self.origins.get(node)
        self.origins[node] = found if before is None else before | found
        return self.origins[node] != before

    def _joined(self, nodes: Sequence[fx.Node]) -> Origin:
        origin = _NOTHING
        for node in nodes:
            origin |= self.origins.get(node, _NOTHING)
        return origin

    def _of(self, node: fx.Node) -> Origin:
        origin, match = self._joined(node.all_input_nodes), self.matches.get(node)
        if _holds_integers(node):
            return origin._replace(tables=frozenset(), floats=0)
        if (table := _table(node)) is not None:
            looked_up = {self._storage(root) for root in roots(table)} if origin.ids else set()
            return origin._replace(tables=frozenset(looked_up))
        if isinstance(match, Product | Attention) or _attends(node):
            return origin._replace(floats=origin.floats if origin.floats == _COMPUTED else 0)
        if match is not None and origin.floats:
            return origin._replace(floats=_COMPUTED)
        return origin

    def _storage(self, table: fx.Node) -> int | None:
        is_attribute = table.op == "get_attr"
        return storage_id(attribute(table)) if is_attribute else self.storages.get(table.name)


def _of_input(node: fx.Node) -> Origin:
    """Returns the origin of a graph input. A scalar does not distinguish channels, and parameters
    and buffers belong to the model, so neither counts."""
    recorded = value(node)
    if is_constant(node) or not isinstance(recorded, Tensor) or not recorded.ndim:
        return _NOTHING
    return Origin(ids=True) if _is_integer(recorded) else Origin(floats=_INPUT)


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _holds_integers(node: fx.Node) -> bool:
    tensors = [leaf for leaf in tree_leaves(value(node)) if isinstance(leaf, Tensor)]
    return bool(tensors) and all(map(_is_integer, tensors))


def _name(node: fx.Node) -> str:
    called = node.op == "call_function"
    return str(getattr(node.target, "__name__", node.target)) if called else ""


def _attends(node: fx.Node) -> bool:
    return _name(node).startswith(_ATTENTIONS)


def _table(node: fx.Node) -> fx.Node | None:
    """Returns the constant in which the node looks ids up, or None."""
    if _name(node) not in _LOOKUPS:
        return None
    return next(filter(is_constant, node.all_input_nodes), None)


def _bases(node: fx.Node) -> list[fx.Node]:
    """Returns the node and the nodes of which it is a view."""
    found, storage = [node], _recorded_storage(node)
    while node.op in ("call_function", "call_method") and node.args:
        first = node.args[0]
        if not isinstance(first, fx.Node) or _recorded_storage(first) != storage:
            break
        node = first
        found.append(node)
    return found


def _recorded_storage(node: fx.Node) -> int | None:
    recorded = value(node)
    return storage_id(recorded) if isinstance(recorded, Tensor) else None
