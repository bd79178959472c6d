"""Expert calls: the operator that replaces a product of experts, linear_experts(x, weight, ...).

It quantizes x itself, in canonical graphs too. If the weights train, or the backward is int8, the
operator is linear_experts_ste(x, w, codes, weight, ...), which quantizes weights that train.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from qfx.graph.views import emit_view
from qfx.match.experts import ExpertProduct
from qfx.ops.forms import EXPERTS, EXPERTS_STE, of_scheme, ste_code
from qfx.ops.lowering import Circumstance, lower
from qfx.ops.packing import Packing
from qfx.plan.plan import Entry
from qfx.rewriting.codes import Provide, emit_call, emit_step, inherit, random_seed
from qfx.values.scheme import Scheme


def multiply_experts(
    found: ExpertProduct, entry: Entry, provide: Provide, results: dict[fx.Node, fx.Node]
) -> fx.Node:
    """Replaces a product of experts by its int8 form and returns the node of the result. `entry`:
    the decision on it. `results`: replacements of earlier nodes."""
    node, site, scheme = found.node, found.site, entry.scheme
    assert scheme is not None
    packing, stem = packing_of(entry, scheme, found.k), f"{node.name}_int8"
    rotation = packing.rotation
    packed = None if site.weight_trains else provide.weight(site, packing).weight
    with node.graph.inserting_before(node):
        x = emit_view(site.x_view, results.get(site.x, site.x))
        tracer = fx.proxy.GraphAppendingTracer(node.graph)
        given = found.sorted(tracer.proxy(x), tracer.proxy)
        values: dict[str, Any] = {"x": given.rows.node, "offsets": given.offsets.node}
        values |= {"weight": packed, "bias": None, "activation": "none"}
        values |= {"out_dtype": site.out_dtype or torch.float32}
        values |= of_scheme(scheme, found.n, rotation)
        if site.weight_trains or (found.trains and scheme.backward == "int8"):
            values |= _of_training(found, scheme, values)
            y = emit_call(node.graph, EXPERTS_STE, values, stem)
        else:
            y = emit_call(node.graph, EXPERTS, values, stem)
        inherit(y, node)
        if found.rows.offsets is None:
            y = emit_view(site.y_view, given.back(tracer.proxy(y), found.experts).node)
    inherit(y, node)
    y.meta = dict(node.meta)
    node.replace_all_uses_with(y)
    node.graph.erase_node(node)
    return y


def _of_training(found: ExpertProduct, scheme: Scheme, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments by which linear_experts_ste differs: the weights if they train, the
    codes of x, and a seed for an int8 backward."""
    graph, site, rotation = found.node.graph, found.site, scheme.block(found.k)
    w = emit_view(site.view, site.weight) if site.weight_trains else None
    x = graph.call_function(torch.detach, (values["x"],))
    (step,), _ = lower(scheme, Circumstance(rotation != 0, trains=True))
    codes = emit_step(graph, step, {**values, "x": x}, found.node.name)
    for made in codes.values():
        inherit(made, found.node)
    seed = None
    if scheme.backward == "int8":
        seed = random_seed(graph, site.device)
    given = {"w": w, "codes": list(codes.values()), "seed": seed}
    return {**given, "code": ste_code(scheme, rotation)}


def packing_of(entry: Entry, scheme: Scheme, k: int) -> Packing:
    """Returns how the weights of a product of experts are stored."""
    rounding = entry.recipe.rounding if entry.recipe else None
    return Packing(scheme.w, rotation=scheme.block(k), rounding=rounding, group=scheme.group)
