"""Epilogue: a bias and an activation function after a matmul become part of its match, if nothing
else reads the result of the matmul."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from qfx.graph.activations import ACTIVATIONS
from qfx.graph.bodies import RECORDS
from qfx.graph.capture import is_constant, value
from qfx.graph.patterns import calls
from qfx.match.norm import norm_of
from qfx.match.site import Site

_ADDS = (operator.add, torch.add, ".add", torch.ops.aten.add.Tensor)


def with_epilogue(site: Site, written: set[fx.Node]) -> Site:
    """Returns the match with the bias and the activation function that follow the matmul included,
    if only they read its result; otherwise `site` itself."""
    grown = _grow_bias(site)
    site = site if grown.bias in written else replace(grown, trains=trains(grown.out))
    if site.trains:  # the gradient of an activation needs its input
        return site
    site = _grow_norm(site, written)
    found = activation_after(site.out)
    return replace(site, end=found[0], activation=found[1]) if found else site


def activation_after(node: fx.Node) -> tuple[fx.Node, str] | None:
    """Returns the last node and the name of the activation function of `node`, if only that reads
    it; otherwise None."""
    for end in node.users:
        if name := _one_call(node, end) or _several_calls(node, end):
            return end, name
    return None


def _one_call(v: fx.Node, end: fx.Node) -> str | None:
    """Returns the name of the activation function of `v` that the node `end` computes, if no other
    node reads `v`; otherwise None."""
    if len(v.users) != 1 or end.args[:1] != (v,):
        return None
    fits = (
        name for name, row in ACTIVATIONS.items()
        if calls(end, *row.plain) or (calls(end, *row.spelled) and _says(end, row.settings))
    )  # fmt: skip
    return next(fits, None)


def _several_calls(v: fx.Node, end: fx.Node) -> str | None:
    """Returns the name of the activation function of `v` that several calls compute, the last of
    them `end`, if only these calls read `v`; otherwise None."""
    fits = (
        name for name, row in ACTIVATIONS.items() for pattern in row.composed
        if pattern.starts_at(end) and pattern.match(end) == {"v": v} and _alone(v, end)
    )  # fmt: skip
    return next(fits, None)


def _alone(v: fx.Node, end: fx.Node) -> bool:
    """Whether `v`, and what is computed from it up to `end`, has no other reader and no keyword
    arguments."""
    inside, todo = {end}, [end]
    while todo:
        sources = {*todo.pop().all_input_nodes} - {v} - inside
        inside |= sources
        todo += sources
    readers = {user for node in ({v} | inside) - {end} for user in node.users}
    return readers <= inside and not any(node.kwargs for node in inside)


def _says(node: fx.Node, settings: Mapping[str, Any]) -> bool:
    """Whether a call has these settings, given by name or, in their order, as the arguments after
    the tensor; an omitted one counts as "none"."""
    given = dict(zip(settings, node.args[1:], strict=False)) | node.kwargs
    return all(given.get(name, "none") == wanted for name, wanted in settings.items())


def trains(node: fx.Node) -> bool:
    """Whether gradients are recorded at the node, or at the higher-order operator whose subgraph
    contains the node."""
    owner = node.graph.owning_module
    inside = owner is not None and owner.meta.get(RECORDS, False)
    return inside or bool(getattr(value(node), "requires_grad", False))


def _grow_bias(site: Site) -> Site:
    """Extends the match of x @ w to x @ w + b if the only reader of x @ w adds b, a constant with
    one element per output feature: b becomes the bias. Otherwise returns `site` itself."""
    add = _only_user(site.out)
    if site.bias is not None or site.y_view or add is None or not calls(add, *_ADDS) or add.kwargs:
        return site
    others = [a for a in add.args if a is not site.out]
    if len(add.args) != 2 or len(others) != 1 or not isinstance(others[0], fx.Node):
        return site
    bias = value(others[0])
    same_type = getattr(bias, "dtype", None) == site.out_dtype
    if not is_constant(others[0]) or bias.shape != (site.n,) or not same_type:
        return site
    return replace(site, bias=others[0], end=add)


def _grow_norm(site: Site, written: set[fx.Node]) -> Site:
    """Extends the match by a batch norm with constant statistics that is the only reader of its
    result, if its channels are the outputs of the matmul."""
    user = _only_user(site.out)
    norm = norm_of(user) if user is not None else None
    channels = site.y_view[-1:] in ((_LAST,), (_CONTIGUOUS,)) and _LAST in site.y_view
    flat = not site.y_view and getattr(value(site.node), "ndim", 0) == 2
    if norm is None or user is None or not (channels or flat) or site.norm is not None:
        return site
    if any(n in written for n in norm.constants if n is not None):
        return site
    return replace(site, norm=norm, end=user)


_LAST, _CONTIGUOUS = ("movedim", (-1, 1)), ("contiguous", ())


def _only_user(node: fx.Node) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].op != "output" else None
