"""Expert calls: the operator that replaces a product of experts, linear_experts(x, weight, ...).

It quantizes x itself, in canonical graphs too: no operator multiplies codes of sorted rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from qfx.graph.views import emit_view
from qfx.match.experts import ExpertProduct
from qfx.ops.expert_rows import SortedRows, by_number, in_equal_parts
from qfx.ops.forms import EXPERTS, of_scheme
from qfx.ops.packing import Packing
from qfx.rewriting.codes import Provide, emit_call, inherit
from qfx.values.scheme import Scheme


def multiply_experts(
    found: ExpertProduct, scheme: Scheme, provide: Provide, results: dict[fx.Node, fx.Node]
) -> fx.Node:
    """Replaces a product of experts by its int8 form and returns the node of the result.
    `results`: replacements of earlier nodes."""
    node, site = found.node, found.site
    rotation = scheme.block(found.k)
    packing = Packing(scheme.w, rotation=rotation, group=scheme.group)
    packed = provide.weight(site, packing)
    with node.graph.inserting_before(node):
        x = emit_view(site.x_view, results.get(site.x, site.x))
        tracer = fx.proxy.GraphAppendingTracer(node.graph)
        given = _sorted(found, tracer.proxy(x))
        values: dict[str, Any] = {"x": given.rows.node, "offsets": given.offsets.node}
        values["weight"] = packed.weight
        values |= {"bias": None, "activation": "none"}
        values |= {"out_dtype": site.out_dtype or torch.float32}
        values |= of_scheme(scheme, found.n, rotation)
        y = emit_call(node.graph, EXPERTS, values, f"{node.name}_int8")
        inherit(y, node)
        if found.rows.offsets is None:
            y = emit_view(site.y_view, given.back(tracer.proxy(y), found.experts).node)
    inherit(y, node)
    y.meta = dict(node.meta)
    node.replace_all_uses_with(y)
    node.graph.erase_node(node)
    return y


def _sorted(found: ExpertProduct, x: Any) -> SortedRows:
    """Emits what sorts the rows of x by expert. Takes and returns traced values."""
    rows, trace = found.rows, x.tracer.proxy
    if rows.offsets is not None:
        return SortedRows(x, trace(rows.offsets))
    if rows.numbers is None:
        return in_equal_parts(x, found.experts)
    return by_number(x, trace(rows.numbers), found.experts)
