"""Canonical form: rewrites a graph according to a plan, with three operators for every int8 matmul.

    q, scale, zero_point = quantize(x, code)           one node for matmuls that share x
    acc = int8_mm(q, zero_point, weight, n)            exact int32
    y = dequantize(acc, scale, weight_scale(weight, n), bias, activation)

The canonical form is readable and slow. It defines the semantics; `fuse` makes it fast without
changing a bit. If the scheme transforms K, `rotate` comes first, in float32; if it is static,
`quantize` receives its scale. Forms that are not a single int8 GEMM have `linear` for the last two
operators, or `linear_float` for all three: `qfx.ops.lowering` lists the steps, for which nodes are
made here. The outliers of a recipe become a small float linear in addition, and the activation
function then follows the sum.

If gradients are recorded, the last two operators are replaced by the one that has gradients:

    y = linear_ste(x, w, bias, x_step, w_step, [q, scale, zero_point], weight, layout, code)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from qfx.graph.activations import activate
from qfx.graph.capture import value
from qfx.graph.faults import at
from qfx.graph.views import emit_view
from qfx.match.attention import Attention
from qfx.match.experts import ExpertProduct
from qfx.match.grouped import GroupedConvolution
from qfx.match.products import Product
from qfx.match.recurrent import RecurrentSteps
from qfx.match.site import Site
from qfx.ops.guard_counts import Guard
from qfx.ops.lowering import Circumstance, LoweringStep, lower
from qfx.plan.plan import Entry, Plan
from qfx.rewriting.attention_calls import attend
from qfx.rewriting.codes import (
    Inputs,
    Provide,
    SiteNodes,
    emit,
    emit_step,
    inherit,
    nodes_of,
    quantized,
    random_seed,
)
from qfx.rewriting.erasing import erase
from qfx.rewriting.expert_calls import multiply_experts
from qfx.rewriting.folded_norm import foldable, with_folded_norm
from qfx.rewriting.grouped_calls import convolve_groups
from qfx.rewriting.notation import OF_MODEL
from qfx.rewriting.recurrent_calls import run_steps
from qfx.values.scheme import QSpec, Scheme

ops = torch.ops.qfx
aten = torch.ops.aten


def rewrite(gm: fx.GraphModule, plan: Plan, provide: Provide) -> None:
    """Changes `gm` in place to the canonical form of `plan`. Nodes that compute a matmul have the
    index of its entry in the plan in their metadata. `provide`: adds packed weights and constants
    to the graph."""
    for place, entry in enumerate(plan.entries):
        for node in (entry.match.node, entry.match.out):
            node.meta[OF_MODEL] = place
    results: dict[fx.Node, fx.Node] = {}
    for product, entry in plan.of(Product):
        if entry.scheme:
            with at(product.node):
                results[product.node] = _multiply(product, entry.scheme, results)
    for attention, entry in plan.of(Attention):
        if entry.scheme or entry.decodes:
            with at(attention.node):
                results[attention.node] = attend(attention, entry.decodes, results)
    for experts, entry in plan.of(ExpertProduct):
        if entry.scheme:
            with at(experts.node):
                made = multiply_experts(experts, entry, provide, results)
                results[experts.node] = made
    for grouped, entry in plan.of(GroupedConvolution):
        if entry.scheme:
            with at(grouped.node):
                results[grouped.site.out] = convolve_groups(grouped, entry, provide, results)
    for steps, entry in plan.of(RecurrentSteps):
        if entry.scheme:
            with at(steps.node):
                results[steps.node] = run_steps(steps, entry.scheme, provide)
    sites = [(site, entry) for site, entry in plan.of(Site) if entry.scheme]
    shared = {site.node.graph: Inputs(site.node.graph, results) for site, _ in sites}
    for found, entry in sites:
        with at(found.node):
            inputs = shared[found.node.graph]
            site = foldable(entry, inputs.up_to_date(found))
            inputs.replaced[site.out] = _replace(entry, site, provide, inputs)
    for site in (*(site for site, _ in sites), *_of_several(plan)):
        erase(site.node.graph, site.weight, down_to=set())
    finish(gm, [*shared, *(result.graph for result in results.values())])


def _of_several(plan: Plan) -> list[Site]:
    experts = [found.site for found, entry in plan.of(ExpertProduct) if entry.scheme]
    steps = [found.site for found, entry in plan.of(RecurrentSteps) if entry.scheme]
    grouped = [found.site for found, entry in plan.of(GroupedConvolution) if entry.scheme]
    return [*experts, *steps, *grouped]


def _multiply(product: Product, scheme: Scheme, results: dict[fx.Node, fx.Node]) -> fx.Node:
    """Replaces a matmul of two activations by dequantize(int8_bmm(quantize(a), quantize(b))) and
    returns the node of the result; b has one symmetric scale per row of K."""
    node, spec = product.node, scheme.x
    assert spec is not None
    graph, stem = node.graph, node.name
    with graph.inserting_before(node):
        a, b = (results.get(n, n) for n in (product.a, product.b))
        left = quantized(graph, {"x": emit_view(product.a_view, a)}, spec, stem)
        right_spec, values = QSpec(bits=scheme.w.bits), {"x": emit_view(product.b_view, b)}
        right = quantized(graph, values, right_spec, f"{stem}_right", ("q", "scale"))
        operands = (left["q"], left["zero_point"], right["q"])
        acc = emit(graph, ops.int8_bmm.default, operands, f"{stem}_acc")
        columns = emit_view((("mT", ()),), right["scale"])
        arguments = (acc, left["scale"], None, columns, None, "none", product.dtype)
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
    """Checks and recompiles what was edited: `gm`, and the subgraphs of higher-order operators that
    own `graphs`."""
    for graph in {gm.graph: None, **dict.fromkeys(graphs)}:
        graph.lint()
        assert graph.owning_module is not None
        graph.owning_module.recompile()


def _replace(entry: Entry, site: Site, provide: Provide, inputs: Inputs) -> fx.Node:
    """Replaces a matmul with a weight by its int8 form and returns the node of its output."""
    former, (site, made) = site, with_folded_norm(site, provide)
    graph, bias = site.node.graph, site.bias
    nodes = nodes_of(entry, site, provide)
    if bias is not None and inputs.position.get(bias, -1) > inputs.position[site.node]:
        site.node.prepend(bias)  # the bias, a constant, may come after the matmul
    guarded = entry.guard is not None
    case = Circumstance(nodes.turned, site.trains, guarded, canonical=True)
    shared, own = lower(nodes.scheme, case)
    values = nodes.values | {"bias": bias, "activation": site.activation}
    if bias is not None and site.bias_view:
        with graph.inserting_before(site.node):
            values["bias"] = emit_view(site.bias_view, bias)
    values |= {"out_dtype": _out_dtype(site)} | inputs.of(site, nodes.values, shared)
    with graph.inserting_before(site.node):
        if entry.guard:
            values |= _of_guard(site, entry.guard)
        elif site.trains:
            values |= _of_training(site, nodes)
        split = nodes.outliers is not None and not site.trains
        emitted = (_split if split else _emitted)(site, nodes, own, values)
        y = emit_view(site.y_view, emitted[-1])
    for node in (*emitted, y):
        inherit(node, site.node)
    y.meta = dict(site.out.meta)
    site.out.replace_all_uses_with(y)
    kept = {former.x, former.weight, former.bias}
    erase(graph, site.out, down_to={node for node in kept if node is not None})
    for node in made:
        erase(graph, node, down_to={former.weight})
    return y


def _emitted(
    site: Site, nodes: SiteNodes, steps: Sequence[LoweringStep], values: dict[str, Any]
) -> list[fx.Node]:
    """Emits the nodes of the steps; the last one computes y."""
    made: list[fx.Node] = []
    for step in steps:
        found = emit_step(site.node.graph, step, values, site.node.name)
        values = values | found
        made += found.values()
    return made


def _split(
    site: Site, nodes: SiteNodes, steps: Sequence[LoweringStep], values: dict[str, Any]
) -> list[fx.Node]:
    """Emits a matmul with outliers: the outlier columns of x as a float linear, added to the other
    columns in int8. Equation (R3)."""
    graph, stem = site.node.graph, site.node.name
    sums = values | {"activation": "none", "out_dtype": torch.float32}
    made = _emitted(site, nodes, steps, sums)
    x = emit_view(site.x_view, site.x)
    few = emit(graph, aten.index_select.default, (x, -1, nodes.outliers), f"{stem}_few")
    few = emit(graph, aten.to.dtype, (few, torch.float32), f"{stem}_few_float")
    few = emit(graph, F.linear, (few, nodes.packed.columns), f"{stem}_outliers")
    y = emit(graph, aten.add.Tensor, (made[-1], few), f"{stem}_sum")
    y = _activated(graph, site.activation, y)
    y = emit(graph, aten.to.dtype, (y, values["out_dtype"]), f"{stem}_split")
    return [*made, few, y]


def _activated(graph: fx.Graph, activation: str, y: fx.Node) -> fx.Node:
    """Emits the calls that compute an activation function of the float32 node `y`. Equation
    (E2)."""
    traced: Any = fx.Proxy(y, fx.proxy.GraphAppendingTracer(graph))
    result: Any = activate(activation, traced)
    return result.node  # type: ignore[no-any-return]


def _of_guard(site: Site, guard: Guard) -> dict[str, Any]:
    """Returns the additional arguments of linear_guarded, which chooses between int8 and float for
    each row of x."""
    w = emit_view(site.view, site.weight)
    w = site.node.graph.call_function(torch.detach, (w,))
    return {"guard": guard.limit, "site": guard.site, "w": w}


def _of_training(site: Site, nodes: SiteNodes) -> dict[str, Any]:
    """Returns the additional arguments of linear_ste, which has straight-through gradients to x, to
    w if it trains, and to the bias."""
    graph, w, seed = site.node.graph, None, None
    if site.weight_trains:
        w = emit_view(site.view, site.weight)
    if nodes.scheme.backward == "int8":
        seed = random_seed(graph, site.device)
    return {"w": w, "gradient_seed": seed, "carrier": emit_view(site.x_view, site.x)}


def _out_dtype(site: Site) -> torch.dtype:
    """Returns the dtype of the matmul's epilogue at capture, including autocast."""
    if site.out_dtype is not None:
        return site.out_dtype
    return getattr(value(site.weight), "dtype", torch.float32)
