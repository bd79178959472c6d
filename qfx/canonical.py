"""Rewrite: plan -> the canonical graph, three operators for every int8 site.

    q, scale, zero_point = quantize(x)                 one node for sites that share x
    acc = int8_mm(q, zero_point, packed, n)            exact int32
    y = dequantize(acc, scale, w_scale, bias, activation)

Readable and slow: it is the semantics; `qfx.fuse` makes it fast without changing a bit.

Where gradients are recorded, the last two are one operator that has them:

    y = int8_linear_ste(x, w, bias, q, scale, zero_point, packed, w_scale)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from qfx.attention import Attention
from qfx.capture import value
from qfx.effects import writes
from qfx.fault import at
from qfx.plan import Plan
from qfx.products import Product
from qfx.scheme import QSpec, Scheme
from qfx.site import Site
from qfx.views import View, emit_view

ops = torch.ops.qfx


class PackedNodes(NamedTuple):
    """The graph's names for a packed weight: the blocks and the scale [N]."""

    blocks: fx.Node
    scale: fx.Node


Codes = tuple[fx.Node, ...]  # q, scale, zero_point
ProvideWeight = Callable[[Site, QSpec], PackedNodes]
"""Where the packed weight of a site lives: `qfx.provide` has the choices."""


def rewrite(gm: fx.GraphModule, plan: Plan, provide_weight: ProvideWeight) -> fx.GraphModule:
    """Edits `gm` to the canonical form of `plan` and returns it."""
    products = [
        (e.match, e.scheme) for e in plan.entries if e.scheme and isinstance(e.match, Product)
    ]
    results: dict[fx.Node, fx.Node] = {}
    for product, scheme in products:
        with at(product.node):
            results[product.node] = _multiply(product, scheme, results)
    attentions = [e.match for e in plan.entries if e.scheme and isinstance(e.match, Attention)]
    for attention in attentions:
        with at(attention.node):
            results[attention.node] = _attend(attention, results)
    sites = [(e.match, e.scheme) for e in plan.entries if e.scheme and isinstance(e.match, Site)]
    shared = {site.node.graph: _SharedQuantize(site.node.graph, results) for site, _ in sites}
    for found, scheme in sites:
        with at(found.node):
            quantized = shared[found.node.graph]
            site = quantized.up_to_date(found)
            quantized.replaced[site.out] = _replace(site, scheme, provide_weight, quantized)
    for site, _ in sites:
        erase(site.node.graph, site.weight, down_to=set())
    finish(gm, [*shared, *(result.graph for result in results.values())])
    return gm


def _multiply(product: Product, scheme: Scheme, results: dict[fx.Node, fx.Node]) -> fx.Node:
    """dequantize(int8_bmm(quantize(a), quantize(b))), b with one symmetric scale per row of K."""
    node, spec = product.node, scheme.x
    graph, stem = node.graph, node.name
    with graph.inserting_before(node):
        a, b = (results.get(n, n) for n in (product.a, product.b))
        q, scale, zero_point = _codes(graph, emit_view(product.a_view, a), spec, stem)
        b = emit_view(product.b_view, b)
        b_q, b_scale = _codes(graph, b, QSpec(bits=scheme.w.bits), f"{stem}_right", parts=2)
        acc = emit(graph, ops.int8_bmm.default, (q, zero_point, b_q), f"{stem}_acc")
        columns = emit_view((("mT", ()),), b_scale)
        arguments = (acc, scale, None, columns, None, "none", product.dtype)
        y = emit(graph, ops.dequantize.default, arguments, f"{stem}_dequantize")
        result = emit_view(product.y_view, y)
        if product.alpha != 1:
            result = graph.call_function(torch.mul, (result, product.alpha))
        if product.added is not None:
            terms = (result, results.get(product.added, product.added))
            result = graph.call_function(torch.add, terms, {"alpha": product.beta})
    for made in (acc, y, result):
        _inherit(made, node)
    result.meta = dict(node.meta)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    return result


def _attend(attention: Attention, results: dict[fx.Node, fx.Node]) -> fx.Node:
    """int8_attention(q, k, v, mask): one operator, as a softmax stands between the products."""
    node, nodes = attention.node, (attention.query, attention.key, attention.val, attention.mask)
    operands = tuple(results.get(n, n) if n is not None else None for n in nodes)
    arguments = (*operands, attention.scale, attention.causal, attention.dtype)
    with node.graph.inserting_before(node):
        y = emit(node.graph, ops.int8_attention.default, arguments, f"{node.name}_int8")
    y.meta = dict(node.meta)
    node.replace_all_uses_with(y)
    node.graph.erase_node(node)
    return y


def _codes(graph: fx.Graph, x: fx.Node, spec: QSpec, stem: str, parts: int = 3) -> Codes:
    arguments = (x, list(spec.axes), spec.bits, spec.symmetric)
    triple = emit(graph, ops.quantize.default, arguments, f"{stem}_quantize")
    return tuple(
        emit(graph, operator.getitem, (triple, i), f"{stem}_{part}")
        for i, part in enumerate(("q", "scale", "zero_point")[:parts])
    )


def finish(gm: fx.GraphModule, graphs: Iterable[fx.Graph]) -> None:
    """Checks and recompiles what was edited: `gm` and the bodies that own these graphs."""
    for graph in {gm.graph: None, **dict.fromkeys(graphs)}:
        graph.lint()
        assert graph.owning_module is not None
        graph.owning_module.recompile()


def _replace(
    site: Site, scheme: Scheme, provide_weight: ProvideWeight, quantized: _SharedQuantize
) -> fx.Node:
    graph = site.node.graph
    packed = provide_weight(site, scheme.w)
    bias = site.bias
    if bias is not None and quantized.position.get(bias, -1) > quantized.position[site.node]:
        site.node.prepend(bias)  # a constant may stand between the matmul and its addition
    codes = quantized.of(site, scheme.x)
    with graph.inserting_before(site.node):
        emitted = (_trained if site.trains else _inferred)(site, scheme, codes, packed, bias)
        y = emit_view(site.y_view, emitted[-1])
    for node in (*emitted, y):
        _inherit(node, site.node)
    y.meta = dict(site.out.meta)
    site.out.replace_all_uses_with(y)
    erase(graph, site.out, down_to={site.x, site.weight} | ({bias} if bias else set()))
    return y


def _inferred(
    site: Site, scheme: Scheme, codes: Codes, packed: PackedNodes, bias: fx.Node | None
) -> list[fx.Node]:
    q, scale, zero_point = codes
    graph, stem, n = site.node.graph, site.node.name, _out_features(site, packed)
    acc = emit(graph, ops.int8_mm.default, (q, zero_point, packed.blocks, n), f"{stem}_acc")
    arguments = (acc, scale, None, packed.scale, bias, site.activation, _out_dtype(site))
    return [acc, emit(graph, ops.dequantize.default, arguments, f"{stem}_dequantize")]


def _trained(
    site: Site, scheme: Scheme, codes: Codes, packed: PackedNodes, bias: fx.Node | None
) -> list[fx.Node]:
    graph, w, seed = site.node.graph, None, None
    if site.weight_trains:
        w = emit_view(site.view, site.weight)
    if scheme.backward == "int8":
        seed = graph.call_function(torch.randint, (0, 2**62, (1,)))
    how = (list(scheme.w.axes), scheme.x.bits, scheme.w.bits, scheme.x.symmetric, seed)
    steps = (None, None)  # dynamic scales
    x = emit_view(site.x_view, site.x)
    arguments = (x, w, bias, *steps, *codes, *packed, *how, _out_dtype(site))
    return [emit(graph, ops.int8_linear_ste.default, arguments, f"{site.node.name}_int8")]


def _out_features(site: Site, packed: PackedNodes) -> int | fx.Node:
    """N: a literal where the capture knew it, else read from the weight's scale."""
    if site.n is not None:
        return site.n
    return site.node.graph.call_function(torch.ops.aten.sym_size.int, (packed.scale, 0))


def _out_dtype(site: Site) -> torch.dtype:
    """What the matmul's epilogue returned when it was captured, autocast included."""
    if site.out_dtype is not None:
        return site.out_dtype
    return getattr(value(site.weight), "dtype", torch.float32)


def _records(x: fx.Node) -> bool:
    """Whether a gradient may flow to x; the codes of x are not a way for it."""
    return bool(getattr(value(x), "requires_grad", True))


def _inherit(node: fx.Node, source: fx.Node) -> None:
    for key in ("nn_module_stack", "stack_trace", "source_fn_stack"):
        if key in source.meta:
            node.meta[key] = source.meta[key]


class _SharedQuantize:
    """One quantize node for all sites that read the same x, unless x may change between them."""

    def __init__(self, graph: fx.Graph, replaced: dict[fx.Node, fx.Node]) -> None:
        self.graph = graph
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.write_positions = [i for n, i in self.position.items() if writes(n)]
        self.replaced = dict(replaced)  # the former output of a site -> its int8 form
        self.made: dict[tuple[fx.Node, View, QSpec], tuple[int, Codes]] = {}

    def up_to_date(self, site: Site) -> Site:
        """The site, reading the int8 form of what other sites produced."""
        bias = None if site.bias is None else self.replaced.get(site.bias, site.bias)
        return replace(site, x=self.replaced.get(site.x, site.x), bias=bias)

    def of(self, site: Site, spec: QSpec) -> Codes:
        """(q, scale, zero_point) of the site's input, valid where the site stands."""
        here = self.position[site.node]
        key = (site.x, site.x_view, spec)
        if key in self.made:
            there, nodes = self.made[key]
            if not any(there < i < here for i in self.write_positions):
                return nodes
        with self.graph.inserting_before(site.node):
            gradients = site.trains or _records(site.x)
            x = self.graph.call_function(torch.detach, (site.x,)) if gradients else site.x
            x = emit_view(site.x_view, x)
            nodes = _codes(self.graph, x, spec, site.x.name)
            _inherit(nodes[0].all_input_nodes[0], site.node)
        self.made[key] = (here, nodes)
        return nodes


def emit(graph: fx.Graph, target: Callable[..., Any], args: tuple[Any, ...], name: str) -> fx.Node:
    """A function call at the graph's insertion point, named for readers."""
    return graph.create_node("call_function", target, args, name=name)


def erase(graph: fx.Graph, node: fx.Node, down_to: set[fx.Node]) -> None:
    """Removes a node without users, then its inputs that this orphaned, never those in `down_to`.

    `Graph.eliminate_dead_code` would delete in-place operations of a Dynamo graph.
    """
    if node._erased or node.users or node in down_to or node.op in ("placeholder", "output"):
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    node.meta.clear()  # the graph still knows the node, and this may refer to parameters
    for source in inputs:
        if not writes(source):
            erase(graph, source, down_to)
