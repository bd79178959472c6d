"""Compilation per layer. With a graph break in each layer, Dynamo compiles one layer and runs the
result for all similar layers. If the configuration treats the layers differently, this module makes
Dynamo compile each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from qfx.graph.capture import NAMED, value
from qfx.host.dynamo import local_source, tie_to_objects
from qfx.host.frame import Surroundings, place
from qfx.host.nodes import source
from qfx.match.base import Match, of_kind
from qfx.match.selection import decides_on_module, decides_on_weight
from qfx.match.site import Site
from qfx.values.config import Config


def compile_per_layer(matches: Sequence[Match], config: Config, here: Surroundings) -> None:
    """Adds guards by which Dynamo reuses the captured graph only for the present modules and
    weights, as far as the decisions of `config` depend on them."""
    if config.skip or config.only or config.by_name:
        tie_to_objects((*_modules(matches, config, here), *_weights(matches, config, here)))


def capture_per_layer(gm: fx.GraphModule) -> None:
    """Adds guards by which Dynamo reuses the captured graph only for the present tensors. This
    applies to inputs whose names are not relative to a module of the frame: when the graph runs, it
    could not be determined to which layer such an input belongs."""
    inputs = gm.graph.find_nodes(op="placeholder")
    tie_to_objects([source(n) for n in inputs if NAMED in n.meta and not n.meta[NAMED].root])


def _modules(matches: Sequence[Match], config: Config, here: Surroundings) -> Iterator[Any]:
    """Yields Dynamo's sources of those modules of the frame on which the decisions of `config`
    depend. If these are guarded, Dynamo's limit on recompilations applies to each module
    separately."""
    around = here.roots(config.recipe_names)
    for name, module in here.locals.items():
        root, path = place(module, around)
        alike = [p for p, other in root.named_modules() if type(other) is type(module)]
        if path and decides_on_module(config, matches, path, alike):
            yield local_source(name)


def _weights(matches: Sequence[Match], config: Config, here: Surroundings) -> Iterator[Any]:
    """Yields Dynamo's sources of those weights on which the decisions of `config` depend and that
    the frame does not reach through its modules."""
    around = here.roots(config.recipe_names)[:1]
    known = [item for module in around for item in module.named_parameters()]
    for site, weight in ((s, w) for s in of_kind(matches, Site) for w in s.weights):
        named, shape = weight.meta.get(NAMED), getattr(value(weight), "shape", None)
        alike = [name for name, other in known if other.shape == shape]
        if named and not named.root and decides_on_weight(config, site, alike):
            yield source(weight)
