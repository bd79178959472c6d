"""Smoothing factors for the matmuls of a captured graph, as they are computed for the module to
which the graph belongs.

Factors are looked up by weight, so the metadata that `note_factors` stores with a graph keeps no
tensor alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn

from qfx.graph.capture import attribute
from qfx.graph.views import View, apply
from qfx.host.dynamo import local_source, tie_to_objects
from qfx.host.frame import Surroundings
from qfx.host.tensors import is_fake, storage_id
from qfx.match.base import Match
from qfx.match.site import Site
from qfx.match.token_flow import why_not_from_ids
from qfx.weights.smoothing.factors import TokenModule, parts_of
from qfx.weights.smoothing.token_ids import has_part_taking_ids, token_ids_of

Factor = tuple[float, ...]
WhyNot = Callable[[Site, int | None], str]
_NOTE = "qfx_factors"


@dataclass(frozen=True)
class GraphFactors:
    """The smoothing factors for the matmuls of a graph that belongs to `module`. `storages`: the
    storages of the graph's inputs, by name. `own`: the graph is the module itself, and its only
    input is token ids."""

    module: Callable[[], nn.Module | None]
    storages: Mapping[str, int | None]
    own: bool = False

    def of(self, site: Site, parts: Iterable[TokenModule], why_not: WhyNot) -> Factor | str | None:
        """Returns the factors [K] by which x is multiplied and w divided, or the reason why they
        are not used, or None if nothing is known about the weight. `why_not`: a function like the
        result of `why_not_from_ids`."""
        weights = site.weights
        if len(weights) != 1:
            return None
        storage, axis = self._storage(weights[0]), _axis_of_k(site.view)
        if storage is None or axis is None:
            return None
        for part in parts:
            factor = part.factors.get((storage, axis))
            if factor is not None and len(factor) == site.k:
                return ("" if self.own else why_not(site, part.table)) or factor
        return next((p.reason for p in parts if p.reason and storage in p.weights), None)

    def _storage(self, weight: fx.Node) -> int | None:
        is_attribute = weight.op == "get_attr"
        return storage_id(attribute(weight)) if is_attribute else self.storages.get(weight.name)


def note_factors(gm: fx.GraphModule, examples: Sequence[Any], here: Surroundings) -> bool:
    """Stores, in the metadata of the graph, the module that has the smoothing factors for its
    matmuls. Returns False if there is no such module."""
    module = _taking_ids(here)
    if module is None:
        return False
    inputs = zip(gm.graph.find_nodes(op="placeholder"), examples, strict=True)
    tensors = {n.name: e for n, e in inputs if isinstance(e, Tensor) and not is_fake(e)}
    storages = {name: storage_id(tensor) for name, tensor in tensors.items()}
    gm.meta[_NOTE] = GraphFactors(weakref.ref(module), storages)
    return True


def note_own_factors(gm: fx.GraphModule) -> None:
    """Stores, in the metadata of the graph, that the graph itself is the module that has the
    smoothing factors. This applies to a graph that holds its own weights, such as the argument of
    `qfx.rewrite`."""
    if token_ids_of(gm) is not None:
        gm.meta[_NOTE] = GraphFactors(weakref.ref(gm), {}, own=True)


def factors_noted(
    gm: fx.GraphModule, matches: Sequence[Match]
) -> Callable[[Site], Factor | str | None]:
    """Returns the function by which `decide` gets the smoothing factors of a matmul, from the
    module that `note_factors` or `note_own_factors` stored. The first call of the function runs
    this module, unless nothing has changed since its last run."""
    noted = gm.meta.get(_NOTE)
    if not isinstance(noted, GraphFactors):
        return lambda site: None
    parts = cache(lambda: parts_of(noted.module()))
    flow = cache(lambda: why_not_from_ids(gm, matches, noted.storages))
    return lambda site: noted.of(site, parts(), lambda *arguments: flow()(*arguments))


def tie_to_modules(here: Surroundings) -> None:
    """Adds guards by which Dynamo reuses the graph being compiled only for the present modules of
    its frame, the function that Dynamo compiles: other modules have other smoothing factors."""
    tie_to_objects([local_source(name) for name in here.locals])


def _taking_ids(here: Surroundings) -> nn.Module | None:
    """Returns the module of the graph if it has a part that takes token ids, else the nearest such
    module around it."""
    first = next(iter(here.locals.values()), None)
    around = [m for m in here.running if m is not first] + ([] if first is None else [first])
    return next(filter(has_part_taking_ids, reversed(around)), None)


def _axis_of_k(view: View) -> int | None:
    """Returns the axis of the constant that becomes K if the view is the constant itself or its
    transpose, else None."""
    whole = torch.empty(2, 3, dtype=torch.float32, device="meta")
    try:
        seen = apply(view, whole)
    except (RuntimeError, IndexError):
        return None
    for axis, expected in ((1, whole), (0, whole.t())):
        if (seen.shape, seen.stride()) == (expected.shape, expected.stride()):
            return axis
    return None
