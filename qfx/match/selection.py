"""Selection: which matmuls of a graph a `Config` refers to, and which entries of its recipe belong
to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeVar

from torch import fx

from qfx.io.errors import UserError
from qfx.match.attention import Attention
from qfx.match.base import Match, of_kind
from qfx.match.experts import ExpertProduct
from qfx.match.products import Product
from qfx.match.site import Site
from qfx.values.config import Config
from qfx.values.recipe import Recipe
from qfx.values.select import left_out
from qfx.values.site_recipe import PinnedProduct, SiteRecipe

SiteKey = tuple[str, int]  # its name, and its index among the graph's sites of that name
Found = TypeVar("Found", bound=Match)


def decides_on_module(
    config: Config, matches: Iterable[Match], path: str, others: Iterable[str]
) -> bool:
    """Whether the configuration would decide differently on the matmuls of the module at `path` if
    it had one of the paths `others`."""
    if config.by_name:
        pinned = config.recipe is not None and config.recipe.pinned is not None
        return any(m.weights or (pinned and isinstance(m, _OF_ACTIVATIONS)) for m in matches)
    own = [m.names for m in matches]
    here = [left_out(config, candidates) for candidates in own]
    elsewhere = ([left_out(config, _moved(n, path, other)) for n in own] for other in others)
    return any(found != here for found in elsewhere)


def decides_on_weight(config: Config, site: Site, others: Iterable[str]) -> bool:
    """Whether the configuration would decide differently on a matmul if its weight had one of the
    names `others`."""
    here = left_out(config, site.names)
    called = ((other, other.rpartition(".")[0]) if site.path else (other,) for other in others)
    return config.by_name or any(left_out(config, candidates) != here for candidates in called)


def why_apart(config: Config, site: Site) -> str | None:
    """Checks a matmul that several layers share, because they call the same subgraph with different
    weights. Returns why it stays float if the configuration decides differently on these weights,
    otherwise None."""
    numbers = {s.name: _numbers(s) for s in config.recipe.sites} if config.recipe else {}
    left = left_out(config, site.names)
    by_pattern = (o for o in site.others if left_out(config, (o, o.rpartition(".")[0])) != left)
    by_recipe = (o for o in site.alike if numbers.get(o) != numbers.get(site.name))
    other = next(chain(by_pattern, by_recipe), None)
    return other and (
        f"the layers share one compiled graph, and the configuration treats {other} differently"
    )


def _numbers(recipe: SiteRecipe) -> SiteRecipe:
    """Returns the entry of a recipe without its place in the model and its measured quality, so
    that two entries can be compared."""
    return replace(recipe, name="", call=0, sqnr_db=None, reason="", divergence=None)


def _moved(candidates: Sequence[str], path: str, other: str) -> list[str]:
    inside = [n for n in candidates if f"{n}.".startswith(f"{path}.")]
    outside = [n for n in candidates if n not in inside]
    return [*outside, *(f"{other}{n.removeprefix(path)}".strip(".") for n in inside)]


def recipes(recipe: Recipe | None, matches: Sequence[Match]) -> dict[fx.Node, SiteRecipe]:
    """Returns the entry of `recipe` for each matmul of the graph that it names, by the node of the
    matmul.

    Raises ValueError for a matmul that has another N or K in the model.
    """
    by_key = {(s.name, s.call): s for s in recipe.sites} if recipe else {}
    found = {}
    for key, site in (*keyed_sites(matches), *keyed_experts(matches)):
        named = by_key.get(key)
        if named is None:
            continue
        if (site.n or named.n, site.k or named.k) != (named.n, named.k):
            raise UserError(
                f"recipe: {named} has K={named.k} and N={named.n} in the recipe, and K={site.k} "
                f"and N={site.n} in the model: calibrate this model, or load the recipe's model"
            )
        found[site.node] = named
    return found


def keyed_sites(matches: Iterable[Match]) -> list[tuple[SiteKey, Site]]:
    """Returns the matmuls with a weight (sites) among `matches`, each with the key by which a
    recipe refers to it: its name, and its index among the sites of the same name."""
    return _numbered((site.name, site) for site in of_kind(matches, Site))


def keyed_experts(matches: Iterable[Match]) -> list[tuple[SiteKey, ExpertProduct]]:
    """Returns the products of experts among `matches`, each with such a key: the name of the
    parameter that has the weights, and the index among the products of the same name."""
    return _numbered((found.site.parameter, found) for found in of_kind(matches, ExpertProduct))


def _numbered(named: Iterable[tuple[str, Found]]) -> list[tuple[SiteKey, Found]]:
    counts, found = Counter[str](), []
    for name, match in named:
        found.append(((name, counts[name]), match))
        counts[name] += 1
    return found


_OF_ACTIVATIONS = (Product, Attention)


def keyed_products(matches: Iterable[Match]) -> Iterator[tuple[tuple[str, int], Match]]:
    """Yields the matmuls of two activations and the attentions, each with the key by which a recipe
    refers to it: its name, and the index among those of the same name."""
    calls = Counter[str]()
    for m in matches:
        if isinstance(m, _OF_ACTIVATIONS):
            yield (m.name, calls[m.name]), m
            calls[m.name] += 1


def pinned(recipe: Recipe | None, matches: Sequence[Match]) -> dict[fx.Node, PinnedProduct]:
    """Returns the entry of `recipe` for each matmul of two activations and each attention that it
    names, by node."""
    by_key = {(p.name, p.call): p for p in (recipe and recipe.pinned) or ()}
    return {m.node: by_key[key] for key, m in keyed_products(matches) if key in by_key}
