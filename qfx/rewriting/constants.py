"""Packed weights and constants of a rewritten graph: they are stored as its buffers, as its inputs,
or computed in the graph itself, and are passed to the subgraphs of higher-order operators.

`as_placeholders` and `as_constants` make the `Provide` of the canonical form. A weight that several
matmuls use in the same way is packed once, and equal constants are stored once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor, fx

from qfx.graph.bodies import Given, callers, family, siblings
from qfx.graph.capture import OUTER, attribute, roots, value
from qfx.graph.computed import computation_of, evaluated, sources_of
from qfx.graph.views import View, emit_view, token
from qfx.host.nodes import mark_as_new_input
from qfx.io.errors import UserError
from qfx.match.site import Site
from qfx.ops.packing import Constant, Packing, expert_parts, parts_of
from qfx.rewriting.codes import PackedNodes, Provide, ProvideConstant, ProvideWeight
from qfx.weights.cache import pack
from qfx.weights.folded import Fold
from qfx.weights.graph_inputs import GraphInputs, PackedPart, WeightSource


class Slot(NamedTuple):
    """A packed weight that the graph takes as the inputs `nodes`."""

    weight: fx.Node
    view: View
    packing: Packing
    nodes: PackedNodes


class FoldedNode(NamedTuple):
    """A value that is computed from inputs of the graph, `sources`, outside the graph."""

    sources: tuple[fx.Node, ...]
    compute: Callable[..., Tensor]


@dataclass
class NewInputs:
    """The inputs that the caller of a rewritten graph must pass in addition to the former ones.
    `folds`: the values that are computed outside the graph, by their former nodes; `folded`: the
    new inputs for some of them."""

    slots: list[Slot] = field(default_factory=list)
    constants: dict[fx.Node, Constant] = field(default_factory=dict)
    folds: dict[fx.Node, FoldedNode] = field(default_factory=dict)
    folded: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.slots or self.constants)

    def fold(self, node: fx.Node) -> None:
        """Records that the value of `node` is computed outside the graph."""
        self.folds.setdefault(node, FoldedNode(sources_of(node), computation_of(node)))


def as_placeholders(gm: fx.GraphModule, added: NewInputs) -> Provide:
    """Returns a `Provide` that adds packed weights and constants as new inputs of the graph, and
    records them in `added`.

    Weights that train or are `repacked`, and constants inside the graph, are packed in the graph.
    """

    def cached(site: Site) -> bool:
        return _all_are("placeholder", site.weight) and not (site.weight_trains or site.repacked)

    def new_input(name: str) -> fx.Node:
        node = _new_input(gm.graph, name)
        mark_as_new_input(node)
        return node

    def make(site: Site, packing: Packing) -> PackedNodes:
        parts = _names(site.weight.name, site.view, packing)
        nodes = PackedNodes(**{part: new_input(name) for part, name in parts.items()})
        added.slots.append(Slot(site.weight, site.view, packing, nodes))
        if sources_of(site.weight):
            added.fold(site.weight)
        return nodes

    def folded(node: fx.Node) -> fx.Node:
        if not _all_are("placeholder", node):
            return node
        added.fold(node)
        made = new_input(f"{node.name}_folded")
        made.meta["example_value"] = value(node)
        added.folded[made] = node
        return made

    def constant(value: Constant, name: str) -> fx.Node:
        node = new_input(name)
        added.constants[node] = value
        return node

    return _provide(gm, make, cached, constant, folded)


def _all_are(op: str, weight: fx.Node) -> bool:
    """Whether a constant, or all constants that a weight is computed from, are nodes of this
    kind."""
    return all(root.op == op for root in sources_of(weight) or roots(weight))


def as_constants(gm: fx.GraphModule) -> Provide:
    """Returns a `Provide` that packs the constants of the graph now and stores them as buffers of
    `gm`; graph inputs are packed in the graph."""

    def is_buffer(site: Site) -> bool:
        return _all_are("get_attr", site.weight) and not site.weight_trains

    def buffer(name: str, tensor: Tensor) -> fx.Node:
        name = _free_name(gm, name)
        gm.register_buffer(name, tensor)
        with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
            return gm.graph.get_attr(name)

    def make(site: Site, packing: Packing) -> PackedNodes:
        own = site.weight.op == "get_attr"
        weight = attribute(site.weight) if own else evaluated(site.weight)
        packed = pack(weight, site.view, packing).tensors
        names = _names(str(site.weight.target if own else site.weight), site.view, packing)
        parts = zip(names.items(), packed, strict=True)
        return PackedNodes(**{part: buffer(name, tensor) for (part, name), tensor in parts})

    def folded(node: fx.Node) -> fx.Node:
        return buffer(f"{node}_folded", evaluated(node)) if _all_are("get_attr", node) else node

    return _provide(gm, make, is_buffer, lambda value, name: buffer(name, value.tensor()), folded)


def _provide(
    gm: fx.GraphModule,
    make: ProvideWeight,
    outside: Callable[[Site], bool],
    make_constant: Callable[[Constant, str], fx.Node],
    folded: Callable[[fx.Node], fx.Node],
) -> Provide:
    constant = _handed_down(gm, make_constant)

    def packed_in(site: Site, packing: Packing) -> PackedNodes:
        return in_graph(site, packing, constant)

    def in_root(site: Site, packing: Packing) -> PackedNodes:
        return (make if outside(site) else packed_in)(site, packing)

    inside = once_per_weight(packed_in)
    return Provide(threaded(once_per_weight(in_root), inside, outside), constant, folded)


def _new_input(graph: fx.Graph, name: str) -> fx.Node:
    """Adds a placeholder after all others."""
    last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(last):
        node = graph.placeholder(name)
    node.target = node.name  # two packings may have the same word
    return node


def _names(weight: str, view: View, packing: Packing) -> dict[str, str]:
    """Returns the names of the parts of a packed weight."""
    words = (weight.replace(".", "_").rstrip("_"), token(view), str(packing))
    stem = "_".join(word for word in words if word)
    return {part: f"{stem}_{part}" for part in packing.parts}


def _free_name(gm: fx.GraphModule, name: str) -> str:
    """Returns an unused name. `fc.1` and `fc_1` are two modules: the second name gets a number."""
    numbered = (f"{name}_{i}" for i in itertools.count(1))
    return next(n for n in itertools.chain([name], numbered) if not hasattr(gm, n))


def in_graph(site: Site, packing: Packing, constant: ProvideConstant) -> PackedNodes:
    """Emits nodes that quantize and pack the weight at every call, just before the first matmul
    that needs it, and returns them."""
    if packing.rounding is not None:
        raise UserError(
            f"recipe of {site.name}: it was {packing.rounding}, but here its weight is an input of "
            "the graph, or in it, and packed at every call. Give this graph a recipe without codes"
        )
    graph = site.node.graph
    given = {
        name: constant(graph, value, f"{site.node.name}_{name}")
        for name, value in packing.constants().items()
    }
    with graph.inserting_before(site.node):
        w_nk = graph.call_function(torch.detach, (emit_view(site.view, site.weight),))
        if site.experts:
            traced = fx.Proxy(w_nk, fx.proxy.GraphAppendingTracer(graph))
            parts = expert_parts(traced, site.experts, packing, site.k)
            return PackedNodes(**{part: proxy.node for part, proxy in parts.items()})
        tracer = fx.proxy.GraphAppendingTracer(graph)
        proxies = {name: fx.Proxy(node, tracer) for name, node in given.items()}
        parts = parts_of(fx.Proxy(w_nk, tracer), packing, proxies, site.k)
        return PackedNodes(**{part: proxy.node for part, proxy in parts.items()})


def once_per_weight(make: ProvideWeight) -> ProvideWeight:
    made: dict[tuple[fx.Node, View, Packing], PackedNodes] = {}

    def provide(site: Site, packing: Packing) -> PackedNodes:
        key = (site.weight, site.view, packing)
        if key not in made:
            made[key] = make(site, packing)
        return made[key]

    return provide


def threaded(
    provide: ProvideWeight, inside: ProvideWeight, outside: Callable[[Site], bool]
) -> ProvideWeight:
    """Extends `provide`, which works for matmuls of the root graph, to matmuls in the subgraphs of
    higher-order operators.

    If `outside` returns True for a matmul, its weight is packed outside the subgraph, and the calls
    that lead to the subgraph receive the packed tensors as operands. Otherwise the weight is packed
    inside the subgraph by `inside`.
    """
    made: dict[tuple[fx.Node, View, Packing], PackedNodes] = {}

    def in_root_or_body(site: Site, packing: Packing) -> PackedNodes:
        if not site.weight.meta.get(OUTER):
            return provide(site, packing)
        if not outside(site):
            return inside(site, packing)
        return down(site, packing)

    def down(site: Site, packing: Packing) -> PackedNodes:
        key = (site.weight, site.view, packing)
        if key not in made:
            links: list[Given] = site.weight.meta[OUTER]
            parts = [in_root_or_body(replace(site, weight=g.operand), packing) for g in links]
            for given, packed in zip(links, parts, strict=True):
                for node in packed.nodes:
                    given.call.append(node)
            for weight in siblings(site.weight):
                names = _names(weight.name, site.view, packing).items()
                made[weight, site.view, packing] = PackedNodes(
                    **{part: _new_input(weight.graph, name) for part, name in names}
                )
        return made[key]

    return in_root_or_body


def _handed_down(gm: fx.GraphModule, make: Callable[[Constant, str], fx.Node]) -> ProvideConstant:
    """Extends `make`, which adds a constant to the root graph, to the subgraphs of higher-order
    operators: the calls that lead to a subgraph receive the constant as an operand."""
    made: dict[tuple[fx.Graph, Constant], fx.Node] = {}
    calling = callers(gm)

    def provide(graph: fx.Graph, value: Constant, name: str) -> fx.Node:
        key = (graph, value)
        if key not in made and graph is gm.graph:
            made[key] = make(value, name)
        elif key not in made:
            graphs, calls = family(graph, calling)
            for call in calls:
                call.append(provide(call.node.graph, value, name))
            made.update({(g, value): _new_input(g, name) for g in graphs})
        return made[key]

    return provide


def drop_unused_inputs(gm: fx.GraphModule, added: NewInputs) -> GraphInputs:
    """Removes the inputs of the graph that no node reads any more, which are weights that only int8
    matmuls multiplied. Returns the origin of each remaining input."""
    slots = added.slots
    new = [*(slot.nodes.nodes for slot in slots), tuple(added.constants)]
    parts = {node: PackedPart(s, p) for s, nodes in enumerate(new) for p, node in enumerate(nodes)}
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    given = [n for n in placeholders if n not in parts and n not in added.folded]
    position = {n: i for i, n in enumerate((*given, *added.folds))}
    folds = (
        Fold(tuple(position[source] for source in each.sources), each.compute)
        for each in added.folds.values()
    )
    sources = tuple(WeightSource(position[s.weight], s.view, s.packing) for s in slots)
    inputs: list[int | PackedPart] = []
    for node in placeholders:
        if node in parts:
            inputs.append(parts[node])
        elif node in added.folded:
            inputs.append(position[added.folded[node]])
        elif node.users or not isinstance(node.meta.get("example_value"), Tensor):
            inputs.append(position[node])
        else:
            gm.graph.erase_node(node)
            node.meta.clear()  # the graph still knows the node, and this refers to the parameter
    gm.recompile()
    constants = tuple(added.constants.values())
    return GraphInputs(tuple(inputs), sources, constants, tuple(folds), len(given))
