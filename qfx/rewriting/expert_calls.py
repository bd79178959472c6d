"""Expert calls: the operator that replaces a product of experts, linear_experts(x, weight, ...).

It quantizes x itself, in canonical graphs too: no operator multiplies codes of sorted rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from qfx.graph.views import emit_view
from qfx.match.experts import ExpertProduct
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
        x: Any = emit_view(site.x_view, results.get(site.x, site.x))
        values = {"x": x, "weight": packed.weight, "offsets": found.offsets, "bias": None}
        values |= {"activation": "none", "out_dtype": site.out_dtype or torch.float32}
        values |= of_scheme(scheme, found.n, rotation)
        y = emit_call(node.graph, EXPERTS, values, f"{node.name}_int8")
    inherit(y, node)
    y.meta = dict(node.meta)
    node.replace_all_uses_with(y)
    node.graph.erase_node(node)
    return y
