"""Rewrite: plan -> the canonical graph, three operators for every int8 site.

    q, scale, zero_point = quantize(x)                 one node for sites that share x
    acc = int8_mm(q, zero_point, packed, n)            exact int32
    y = dequantize(acc, scale, w_scale, bias, activation)

Readable and slow: it is the semantics; `fuse` makes it fast without changing a bit. Where the
scheme transforms K, `rotate` comes first, in float32; where it is static, `quantize_static` takes
the place of `quantize`. Weights with groups or zero points have `int8_linear_groups` for the last
two, and float activations `int8_weight_linear` for all three. The outliers of a recipe are a small
float linear beside these, and the activation then stands behind the sum.

Where gradients are recorded, the last two are one operator that has them:

    y = int8_linear_ste(x, w, bias, q, scale, zero_point, packed, w_scale)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from qfx.graph.capture import value
from qfx.graph.faults import at
from qfx.graph.views import emit_view
from qfx.graph.writes import writes
from qfx.host.nodes import is_erased
from qfx.match.attention import Attention
from qfx.match.kinds import Site
from qfx.match.products import Product
from qfx.ops.guard_counts import Guard
from qfx.plan.policy import Entry, Plan
from qfx.rewriting.attention_calls import attend
from qfx.rewriting.codes import (
    Codes,
    Inputs,
    PackedNodes,
    Provide,
    SiteNodes,
    emit,
    emitted_input,
    inherit,
    nodes_of,
    quantized,
)
from qfx.values.scheme import PER_COLUMN, PER_TENSOR, QSpec, Scheme

ops = torch.ops.qfx
aten = torch.ops.aten
_ACTIVATIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "relu": (aten.relu.default, {}),
    "silu": (aten.silu.default, {}),
    "gelu": (aten.gelu.default, {}),
    "gelu_tanh": (aten.gelu.default, {"approximate": "tanh"}),
}


def rewrite(gm: fx.GraphModule, plan: Plan, provide: Provide) -> fx.GraphModule:
    """Edits `gm` to the canonical form of `plan` and returns it."""
    products = [
        (e.match, e.scheme) for e in plan.entries if e.scheme and isinstance(e.match, Product)
    ]
    results: dict[fx.Node, fx.Node] = {}
    for product, scheme in products:
        with at(product.node):
            results[product.node] = _multiply(product, scheme, results)
    for entry in plan.entries:
        if isinstance(entry.match, Attention) and (entry.scheme or entry.decodes):
            with at(entry.match.node):
                results[entry.match.node] = attend(entry.match, entry.decodes, results)
    sites = [(e.match, e) for e in plan.entries if e.scheme and isinstance(e.match, Site)]
    shared = {site.node.graph: Inputs(site.node.graph, results) for site, _ in sites}
    for found, entry in sites:
        with at(found.node):
            inputs = shared[found.node.graph]
            site = inputs.up_to_date(found)
            inputs.replaced[site.out] = _replace(entry, site, provide, inputs)
    for site, _ in sites:
        erase(site.node.graph, site.weight, down_to=set())
    finish(gm, [*shared, *(result.graph for result in results.values())])
    return gm


def _multiply(product: Product, scheme: Scheme, results: dict[fx.Node, fx.Node]) -> fx.Node:
    """dequantize(int8_bmm(quantize(a), quantize(b))), b with one symmetric scale per row of K."""
    node, spec = product.node, scheme.x
    assert spec is not None
    graph, stem = node.graph, node.name
    with graph.inserting_before(node):
        a, b = (results.get(n, n) for n in (product.a, product.b))
        q, scale, zero_point = quantized(graph, emit_view(product.a_view, a), spec, stem)
        b = emit_view(product.b_view, b)
        b_q, b_scale = quantized(graph, b, QSpec(bits=scheme.w.bits), f"{stem}_right", parts=2)
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
        inherit(made, node)
    result.meta = dict(node.meta)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    return result


def finish(gm: fx.GraphModule, graphs: Iterable[fx.Graph]) -> None:
    """Checks and recompiles what was edited: `gm` and the bodies that own these graphs."""
    for graph in {gm.graph: None, **dict.fromkeys(graphs)}:
        graph.lint()
        assert graph.owning_module is not None
        graph.owning_module.recompile()


def _replace(entry: Entry, site: Site, provide: Provide, inputs: Inputs) -> fx.Node:
    """The int8 form of a site takes its place; returns its output."""
    graph, bias = site.node.graph, site.bias
    nodes = nodes_of(entry, site, provide)
    if bias is not None and inputs.position.get(bias, -1) > inputs.position[site.node]:
        site.node.prepend(bias)  # a constant may stand between the matmul and its addition
    codes = () if entry.guard else inputs.of(site, nodes)
    with graph.inserting_before(site.node):
        if entry.guard:
            emitted = _guarded(site, nodes, entry.guard, bias)
        else:
            emitted = _emitted(site, nodes, codes, bias)
        y = emit_view(site.y_view, emitted[-1])
    for node in (*emitted, y):
        inherit(node, site.node)
    y.meta = dict(site.out.meta)
    site.out.replace_all_uses_with(y)
    erase(graph, site.out, down_to={site.x, site.weight} | ({bias} if bias else set()))
    return y


def _emitted(site: Site, nodes: SiteNodes, codes: Codes, bias: fx.Node | None) -> list[fx.Node]:
    if site.trains:
        return _trained(site, nodes, codes, bias)
    if nodes.outliers is not None:
        return _split(site, nodes, codes, bias)
    return _int8(site, nodes, codes, (bias, site.activation, _out_dtype(site)))


def _split(site: Site, nodes: SiteNodes, codes: Codes, bias: fx.Node | None) -> list[fx.Node]:
    """The outliers' columns in float beside the others in int8. (R3)"""
    graph, stem = site.node.graph, site.node.name
    made = _int8(site, nodes, codes, (bias, "none", torch.float32))
    x = emit_view(site.x_view, site.x)
    few = emit(graph, aten.index_select.default, (x, -1, nodes.outliers), f"{stem}_few")
    few = emit(graph, aten.to.dtype, (few, torch.float32), f"{stem}_few_float")
    few = emit(graph, F.linear, (few, nodes.packed.columns), f"{stem}_outliers")
    y = emit(graph, aten.add.Tensor, (made[-1], few), f"{stem}_sum")
    if site.activation != "none":
        function, more = _ACTIVATIONS[site.activation]
        y = graph.call_function(function, (y,), more)
    y = emit(graph, aten.to.dtype, (y, _out_dtype(site)), f"{stem}_split")
    return [*made, few, y]


def _int8(site: Site, nodes: SiteNodes, codes: Codes, rest: tuple[Any, ...]) -> list[fx.Node]:
    """The three operators, or those that take their place; `rest`: bias, activation, type."""
    graph, stem, packed = site.node.graph, site.node.name, nodes.packed
    if nodes.scheme.x is None:
        arguments = (*codes, packed.blocks, packed.scale, *rest)
        return [emit(graph, ops.int8_weight_linear.default, arguments, f"{stem}_int8")]
    if nodes.scheme.grouped:
        arguments = (*codes, packed.blocks, packed.scale, packed.zero_point, *rest)
        return [emit(graph, ops.int8_linear_groups.default, arguments, f"{stem}_int8")]
    q, scale, zero_point = codes
    n = _out_features(site, packed)
    acc = emit(graph, ops.int8_mm.default, (q, zero_point, packed.blocks, n), f"{stem}_acc")
    arguments = (acc, scale, None, packed.scale, *rest)
    return [acc, emit(graph, ops.dequantize.default, arguments, f"{stem}_dequantize")]


def _guarded(site: Site, nodes: SiteNodes, guard: Guard, bias: fx.Node | None) -> list[fx.Node]:
    """int8_linear_guarded(x, w): one operator, as it chooses between the two forms row by row."""
    graph, packed, spec = site.node.graph, nodes.packed, nodes.scheme.x
    assert spec is not None
    w = graph.call_function(torch.detach, (emit_view(site.view, site.weight),))
    operands = (emitted_input(site), w, packed.blocks, packed.scale, packed.error, bias)
    how = (*guard, list(spec.axes), spec.bits, spec.symmetric, site.activation, _out_dtype(site))
    arguments = (*operands, *how, *nodes.transform)
    return [emit(graph, ops.int8_linear_guarded.default, arguments, f"{site.node.name}_int8")]


def _trained(site: Site, nodes: SiteNodes, codes: Codes, bias: fx.Node | None) -> list[fx.Node]:
    graph, w, seed, spec = site.node.graph, None, None, nodes.scheme.w
    x_spec = nodes.scheme.x
    assert x_spec is not None
    if site.weight_trains:
        w = emit_view(site.view, site.weight)
    if nodes.scheme.backward == "int8":
        seed = graph.call_function(torch.randint, (0, 2**62, (1,)))
    axes = PER_TENSOR if spec.axes == PER_COLUMN else spec.axes
    how = (list(axes), x_spec.bits, spec.bits, x_spec.symmetric, seed, _out_dtype(site))
    steps = (nodes.scale, None)  # None: chosen per call
    packed = (nodes.packed.blocks, nodes.packed.scale)
    x = emit_view(site.x_view, site.x)
    arguments = (x, w, bias, *steps, *codes, *packed, *how, *nodes.transform)
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


def erase(graph: fx.Graph, node: fx.Node, down_to: set[fx.Node]) -> None:
    """Removes a node without users, then its inputs that this orphaned, never those in `down_to`.

    `Graph.eliminate_dead_code` would delete in-place operations of a Dynamo graph.
    """
    if is_erased(node) or node.users or node in down_to or node.op in ("placeholder", "output"):
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    node.meta.clear()  # the graph still knows the node, and this may refer to parameters
    for source in inputs:
        if not writes(source):
            erase(graph, source, down_to)
