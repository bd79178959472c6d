"""Grouped calls: the operator that replaces a convolution in groups of channels, conv_dynamic with
a stack of weights. It quantizes x itself, in canonical graphs too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from qfx.graph.views import emit_view
from qfx.match.grouped import GroupedConvolution
from qfx.ops.forms import CONV, of_scheme
from qfx.ops.packing import Packing
from qfx.plan.plan import Entry
from qfx.rewriting.codes import Provide, emit_call, inherit
from qfx.rewriting.erasing import erase
from qfx.rewriting.folded_norm import with_folded_norm


def convolve_groups(
    found: GroupedConvolution, entry: Entry, provide: Provide, results: dict[fx.Node, fx.Node]
) -> fx.Node:
    """Replaces a convolution in groups by its int8 form and returns the node of the result.
    `entry`: the decision on it. `results`: replacements of earlier nodes."""
    former, scheme, n = found.site, entry.scheme, found.n // found.groups
    assert scheme is not None
    site, made = with_folded_norm(former, provide)
    site = replace(site, n=n, experts=found.groups)
    site = replace(site, view=(*site.view, ("unflatten", (0, (found.groups, n)))))
    rotation = scheme.block(found.k)
    packed = provide.weight(site, Packing(scheme.w, rotation=rotation)).weight
    names = ("kernel", "stride", "padding", "dilation")
    windows = {name: list(each) for name, each in zip(names, found.windows, strict=True)}
    graph = former.node.graph
    with graph.inserting_before(former.node):
        bias = site.bias and emit_view(site.bias_view, site.bias)
        values: dict[str, Any] = {"x": results.get(site.x, site.x), "weight": packed, "bias": bias}
        values |= {"activation": site.activation, "out_dtype": site.out_dtype or torch.float32}
        values |= windows | of_scheme(scheme, n, rotation)
        y = emit_call(graph, CONV, values, f"{former.node.name}_int8")
        inherit(y, former.node)
        y = emit_view(site.y_view, y)
    inherit(y, former.node)
    y.meta = dict(former.out.meta)
    former.out.replace_all_uses_with(y)
    kept = {former.x, former.weight, former.bias}
    erase(graph, former.out, down_to={node for node in kept if node is not None})
    for node in made:
        erase(graph, node, down_to={former.weight})
    return y
