"""Folded norms: a batch norm after a matmul becomes part of its weight and bias."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from qfx.graph.capture import value
from qfx.graph.views import emit_view
from qfx.match.norm import folded
from qfx.match.site import Site
from qfx.plan.plan import Entry
from qfx.rewriting.codes import Provide


def foldable(entry: Entry, site: Site) -> Site:
    """Returns the match without the batch norm after the matmul if that cannot be folded: recipes
    and guards are of the weight without it."""
    return site if entry.recipe is None and entry.guard is None else site.without_norm()


def with_folded_norm(site: Site, provide: Provide) -> tuple[Site, tuple[fx.Node, ...]]:
    """Returns the match of the matmul whose weight and bias contain the batch norm after it, if
    there is one, and the nodes that compute them."""
    norm = site.norm
    if norm is None:
        return site, ()
    graph = site.node.graph
    for constant in norm.constants:
        if constant is not None and site.node < constant:
            site.node.prepend(constant)
    with graph.inserting_before(site.node):
        w_nk = emit_view(site.view, site.weight)
        given: list[Any] = [
            node and fx.Proxy(node, fx.proxy.GraphAppendingTracer(graph))
            for node in (w_nk, site.bias, *norm.constants)
        ]
        w, b = folded(given[0], given[1], norm.eps, site.bias_view, *given[2:])
    like = value(site.weight).detach()
    for proxy, shape in ((w, (site.n, site.k)), (b, (site.n,))):
        proxy.node.meta["example_value"] = like.new_empty(shape, dtype=torch.float32)
    bias = provide.folded(b.node)
    folded_site = replace(site, weight=w.node, view=(), bias=bias, bias_view=(), norm=None)
    return folded_site, (w.node, b.node)
