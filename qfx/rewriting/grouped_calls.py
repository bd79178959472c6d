"""Grouped calls: the operator that replaces a convolution in groups of channels, conv_dynamic with
a stack of weights, or conv_depthwise. It quantizes x itself, in canonical graphs too."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from qfx.graph.views import emit_view
from qfx.match.grouped import GroupedConvolution
from qfx.match.site import Site
from qfx.ops.depthwise import stored_taps
from qfx.ops.forms import CONV, DEPTHWISE, of_scheme
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
    former, scheme = found.site, entry.scheme
    assert scheme is not None
    former = _with_stored_taps(found) if found.depthwise else former
    site, made = with_folded_norm(former, provide)
    n, call = found.n // found.groups, CONV
    if found.depthwise:
        n, call = found.n, DEPTHWISE
    else:
        site = replace(site, n=n, experts=found.groups)
        site = replace(site, view=(*site.view, ("unflatten", (0, (found.groups, n)))))
    rotation = 0 if found.depthwise else scheme.block(found.k)
    packed = provide.weight(site, Packing(scheme.w, rotation=rotation)).weight
    names = ("kernel", "stride", "padding", "dilation")
    windows = {name: list(each) for name, each in zip(names, found.windows, strict=True)}
    graph = former.node.graph
    with graph.inserting_before(former.node):
        bias = site.bias and emit_view(site.bias_view, site.bias)
        values: dict[str, Any] = {"x": results.get(site.x, site.x), "weight": packed, "bias": bias}
        values |= {"activation": site.activation, "out_dtype": site.out_dtype or torch.float32}
        values |= windows | of_scheme(scheme, n, rotation)
        y = emit_call(graph, call, values, f"{former.node.name}_int8")
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


def _with_stored_taps(found: GroupedConvolution) -> Site:
    """Returns the convolution with the weight that `conv_depthwise` reads: lines of taps with zeros
    behind them."""
    kernel = found.windows[0]
    more = stored_taps(kernel[-1]) - kernel[-1]
    view = (("constant_pad_nd", ((0, more),)), ("flatten", (1,)))
    k = math.prod(kernel[:-1]) * stored_taps(kernel[-1])
    return replace(found.site, view=view, k=k)
