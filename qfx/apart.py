"""Apart: what Dynamo compiles for one layer and would run for all that are like it, where a graph
break makes each a frame of its own, is compiled for each where the configuration tells them apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import fx, nn

from qfx.capture import NAMED, roots, value
from qfx.config import Config
from qfx.frame import place, translated
from qfx.frame import roots as modules_around
from qfx.patterns import decides_on_module, decides_on_weight
from qfx.site import Match, Site


def compile_apart(matches: Sequence[Match], config: Config) -> None:
    """Ties the captured graph to the modules and weights on which its decisions depend."""
    if config.skip or config.only or config.recipe or config.guard:
        _tie((*_modules(matches, config), *_weights(matches, config)))


def capture_apart(gm: fx.GraphModule) -> None:
    """Ties it to the inputs whose names are not relative to a module of the frame, whose layer
    could not be told when the graph runs."""
    inputs = gm.graph.find_nodes(op="placeholder")
    _tie([n._dynamo_source for n in inputs if NAMED in n.meta and not n.meta[NAMED].root])


def _tie(sources: Iterable[Any]) -> None:
    from torch._dynamo.guards import GuardBuilder, install_guard

    for source in sources:
        install_guard(source.make_guard(GuardBuilder.ID_MATCH))


def _modules(matches: Sequence[Match], config: Config) -> Iterator[Any]:
    """Dynamo's sources of the frame's modules. Its limit of recompilations holds for each module by
    itself where this guard tells them apart."""
    from torch._dynamo.source import LocalSource

    around, variables = modules_around(config.recipe), getattr(translated(), "f_locals", {})
    for name, module in ((n, v) for n, v in variables.items() if isinstance(v, nn.Module)):
        root, path = place(module, around)
        alike = [p for p, other in root.named_modules() if type(other) is type(module)]
        if path and decides_on_module(config, matches, path, alike):
            yield LocalSource(name)


def _weights(matches: Sequence[Match], config: Config) -> Iterator[Any]:
    """Those of the weights that the frame has otherwise than through its modules."""
    around = modules_around(config.recipe)[:1]
    known = [item for module in around for item in module.named_parameters()]
    for match, weight in ((m, w) for m in matches if isinstance(m, Site) for w in roots(m.weight)):
        named, shape = weight.meta.get(NAMED), getattr(value(weight), "shape", None)
        alike = [name for name, other in known if other.shape == shape]
        if named and not named.root and decides_on_weight(config, match, alike):
            yield weight._dynamo_source  # type: ignore[attr-defined]
