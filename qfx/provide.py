"""Where the packed weights of a rewritten graph live: its buffers, its inputs, or the graph itself;
and how they get into the bodies of higher-order operators.

Each function returns a `ProvideWeight` for `qfx.canonical.rewrite`; a weight that several sites use
in the same way is packed once.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import fx

from qfx.bodies import Given, siblings
from qfx.canonical import PackedNodes, ProvideWeight
from qfx.capture import OUTER, attribute, roots
from qfx.scheme import PER_TENSOR, QSpec
from qfx.sharding import gathered_weights
from qfx.site import Site
from qfx.views import View, emit_view, token
from qfx.weights import pack

ops = torch.ops.qfx


class Slot(NamedTuple):
    """A packed weight that the graph takes as the inputs `nodes`."""

    weight: fx.Node
    view: View
    spec: QSpec
    nodes: PackedNodes


def as_placeholders(gm: fx.GraphModule, slots: list[Slot]) -> ProvideWeight:
    """New graph inputs; appends to `slots` what the caller must feed them with.

    Weights that train, that FSDP gathers anew for each call, and constants inside the graph are
    packed in the graph.
    """
    gathered = gathered_weights()

    def cached(site: Site) -> bool:
        inputs = all(root.op == "placeholder" for root in roots(site.weight))
        return inputs and not site.weight_trains and not gathered(site)

    def make(site: Site, spec: QSpec) -> PackedNodes:
        if not cached(site):
            return in_graph(site, spec)
        last = [n for n in gm.graph.nodes if n.op == "placeholder"][-1]
        nodes = []
        for part in PackedNodes._fields:
            with gm.graph.inserting_after(last):
                last = gm.graph.placeholder(_name(site.weight.name, site.view, spec, part))
            last._dynamo_source = None  # type: ignore[attr-defined]  # AOTAutograd reads it
            last.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
            nodes.append(last)
        slots.append(Slot(site.weight, site.view, spec, PackedNodes(*nodes)))
        return slots[-1].nodes

    return threaded(once_per_weight(make), cached)


def as_constants(gm: fx.GraphModule) -> ProvideWeight:
    """Buffers of `gm`, packed now, for the constants of a graph; graph inputs are packed in it."""

    def constant(site: Site) -> bool:
        held = all(root.op == "get_attr" for root in roots(site.weight))
        return held and not site.weight_trains

    def make(site: Site, spec: QSpec) -> PackedNodes:
        if not constant(site):
            return in_graph(site, spec)
        packed = pack(attribute(site.weight), site.view, spec)
        nodes = []
        for part, tensor in zip(PackedNodes._fields, packed, strict=True):
            name = _free_name(gm, _name(str(site.weight.target), site.view, spec, part))
            gm.register_buffer(name, tensor)
            with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
                nodes.append(gm.graph.get_attr(name))
        return PackedNodes(*nodes)

    return threaded(once_per_weight(make), constant)


def _name(weight: str, view: View, spec: QSpec, part: str) -> str:
    words = (weight.replace(".", "_").rstrip("_"), token(view), str(spec), part)
    return "_".join(word for word in words if word)


def _free_name(gm: fx.GraphModule, name: str) -> str:
    """`fc.1` and `fc_1` are two modules: the second name gets a number."""
    numbered = (f"{name}_{i}" for i in itertools.count(1))
    return next(n for n in itertools.chain([name], numbered) if not hasattr(gm, n))


def in_graph(site: Site, spec: QSpec) -> PackedNodes:
    """Quantizes and packs at every call, just before the site that needs it first."""
    graph = site.node.graph
    with graph.inserting_before(site.node):
        w_nk = emit_view(site.view, site.weight)
        w_nk = graph.call_function(torch.detach, (w_nk,))
        arguments = (w_nk, list(spec.axes), spec.bits, spec.symmetric)
        triple = graph.call_function(ops.quantize.default, arguments)
        q = graph.call_function(operator.getitem, (triple, 0))
        scale = graph.call_function(operator.getitem, (triple, 1))
        scale = graph.call_function(torch.reshape, (scale, (-1,)))
        if spec.axes == PER_TENSOR:
            scale = graph.call_function(
                torch.ops.aten.expand.default, (scale, (_rows(site, graph),))
            )
        return PackedNodes(graph.call_function(ops.pack_weight.default, (q,)), scale)


def _rows(site: Site, graph: fx.Graph) -> int | fx.Node:
    if site.n is not None:
        return site.n
    w_nk = emit_view(site.view, site.weight)
    return graph.call_function(torch.ops.aten.sym_size.int, (w_nk, 0))


def once_per_weight(make: Callable[[Site, QSpec], PackedNodes]) -> ProvideWeight:
    made: dict[tuple[fx.Node, View, QSpec], PackedNodes] = {}

    def provide(site: Site, spec: QSpec) -> PackedNodes:
        key = (site.weight, site.view, spec)
        if key not in made:
            made[key] = make(site, spec)
        return made[key]

    return provide


def threaded(provide: ProvideWeight, outside: Callable[[Site], bool]) -> ProvideWeight:
    """Extends `provide`, which serves the root graph, to the sites of bodies.

    The weights of sites that may have them packed `outside` are: each call on the way down gets
    their parts as operands. Others are packed inside the body.
    """
    made: dict[tuple[fx.Node, View, QSpec], PackedNodes] = {}

    def in_root_or_body(site: Site, spec: QSpec) -> PackedNodes:
        if not site.weight.meta.get(OUTER):
            return provide(site, spec)
        if not outside(site):
            return inside(site, spec)
        return down(site, spec)

    def down(site: Site, spec: QSpec) -> PackedNodes:
        key = (site.weight, site.view, spec)
        if key not in made:
            links: list[Given] = site.weight.meta[OUTER]
            parts = [in_root_or_body(replace(site, weight=g.operand), spec) for g in links]
            for given, packed in zip(links, parts, strict=True):
                for node in packed:
                    given.call.append(node)
            for weight in siblings(site.weight):
                made[weight, site.view, spec] = _new_inputs(weight, site.view, spec)
        return made[key]

    inside = once_per_weight(in_graph)
    return in_root_or_body


def _new_inputs(weight: fx.Node, view: View, spec: QSpec) -> PackedNodes:
    """Placeholders of the parts, after all others of the weight's graph."""
    last, nodes = [n for n in weight.graph.nodes if n.op == "placeholder"][-1], []
    for part in PackedNodes._fields:
        with weight.graph.inserting_after(last):
            last = weight.graph.placeholder(_name(weight.name, view, spec, part))
        nodes.append(last)
    return PackedNodes(*nodes)
