"""Naming: finds the names that the constants and the calling modules of a captured graph have in
the model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Any

from torch import fx, nn

from qfx.graph.capture import NAMED, SCHEME, Named, called_by, graphs, named_by_source
from qfx.host.frame import Surroundings
from qfx.match.base import Match
from qfx.values.scheme import Scheme
from qfx.values.select import names_in


def name_nodes(
    gm: fx.GraphModule, examples: Sequence[Any], here: Surroundings, wanted: Collection[str] = ()
) -> None:
    """Stores, in the metadata of nodes, the name of each input of a captured graph and the calling
    module of each call.

    `wanted`: names that the model must have, because it may run inside another. Objects are
    identified by identity, not by the expression in the code that reaches them; if an object has
    several names, one that the code uses is chosen. An object that no module of the frame or of the
    stack has registered keeps Dynamo's name.
    """
    known, schemes, owner = _registered(here, wanted), _schemes(here.modules), here.owner()
    for node, example in zip(gm.graph.find_nodes(op="placeholder"), examples, strict=True):
        _note(node, named_by_source(node), known.get(id(example)))
    for node in (n for graph in graphs(gm) for n in graph.nodes if n.op != "placeholder"):
        if caller := called_by(node):
            _note(node, caller.named, known.get(caller.id))
            node.meta.update(schemes.get(caller.id, {}))
        elif owner:
            node.meta[NAMED] = Named(owner, "")


def _note(node: fx.Node, source: Named | None, registered: Sequence[Named] | None) -> None:
    if registered:
        node.meta[NAMED] = source if source in registered else registered[0]


def _registered(here: Surroundings, wanted: Collection[str]) -> dict[int | None, list[Named]]:
    """Returns, for the id of each module, parameter and buffer, its names: first the names relative
    to the frame's modules, then the names in the model."""
    found: dict[int | None, list[Named]] = {}
    for root, module in [*here.named.items(), *(("", m) for m in here.roots(wanted))]:
        for path, part in chain(
            module.named_modules(remove_duplicate=False),
            module.named_parameters(remove_duplicate=False),
            module.named_buffers(remove_duplicate=False),
        ):
            found.setdefault(id(part), []).append(Named(root, path))
    return found


def _schemes(modules: Iterable[nn.Module]) -> dict[int | None, dict[str, Scheme]]:
    """Returns, for the id of each module of `qfx.nn` that has a scheme, the metadata that is added
    to the nodes of its calls, so that plans and reports show the scheme."""
    parts = (part for module in modules for part in module.modules())
    having = ((id(part), getattr(part, "scheme", None)) for part in parts)
    return {key: {SCHEME: scheme} for key, scheme in having if isinstance(scheme, Scheme)}


def known_names(matches: Iterable[Match], modules: Iterable[nn.Module] = ()) -> set[str]:
    """Returns every name that a pattern may refer to: the graph's own, and those of the modules
    around it."""
    known = {name for m in matches for name in (*m.names, m.name)}
    return known.union(*map(names_in, modules))
