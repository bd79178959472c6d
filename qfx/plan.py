"""Plan: sites + config + cost -> for every matmul a scheme, or the reason why it stays float.

The only place with policy. A plan is a value and prints as a table; no kernel is needed to test it.
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import sympy
import torch
from tabulate import tabulate
from torch import fx

from qfx.attention import Attention
from qfx.breakeven import condition, guard
from qfx.config import Config
from qfx.products import Product
from qfx.recipe import Recipe, SiteRecipe
from qfx.scheme import QSpec, Scheme
from qfx.site import Match, Site, Unmatched

# A more accurate scheme is taken when it costs at most this much more time.
ACCURACY_BUDGET = 0.03


@dataclass(frozen=True)
class Estimate:
    """Predicted seconds of one call of a site, in float and in int8."""

    float_s: float
    int8_s: float

    @property
    def gain(self) -> float:
        return self.float_s / self.int8_s


class CostModel(Protocol):
    """Predicts a site's times from its shape; `dtype` is that of the float matmul."""

    def estimate(self, m: int, k: int, n: int, dtype: torch.dtype, scheme: Scheme) -> Estimate: ...

    def estimate_bmm(self, batch: int, m: int, k: int, n: int, dtype: torch.dtype) -> Estimate:
        """Of `batch` products of two activations."""
        ...

    def estimate_attention(
        self, batch: int, m: int, k: int, n: int, dtype: torch.dtype
    ) -> Estimate:
        """Of `batch` attentions of m queries and n keys with k features."""
        ...

    def estimate_decode(self, batch: int, k: int, n: int, dtype: torch.dtype) -> float:
        """How many times as fast as PyTorch's attention of one query `attention_decode` is."""
        ...

    def training(self, m: int, k: int, n: int, dtype: torch.dtype) -> float:
        """Seconds that training adds to a step's int8 forward."""
        ...


@dataclass(frozen=True)
class Entry:
    """The decision on one matmul: `scheme` is None when it stays float, `reason` says why."""

    match: Match
    scheme: Scheme | None
    reason: str
    estimate: Estimate | None = None
    where: sympy.Basic | None = None  # for a symbolic M: the sizes for which int8 gains
    recipe: SiteRecipe | None = None  # what calibration found for the scheme
    decodes: bool = False  # float, but by `attention_decode`

    @property
    def shape(self) -> str:
        if isinstance(self.match, Unmatched):
            return ""
        sizes = (self.match.m, self.match.k, self.match.n)
        each = "x".join("?" if s is None else str(s) for s in sizes)
        return f"{self.match.batch}*{each}" if not isinstance(self.match, Site) else each


@dataclass(frozen=True)
class Plan:
    """One entry for every matmul-like node of a graph, in graph order."""

    entries: tuple[Entry, ...]

    @property
    def quantized(self) -> int:
        return sum(e.scheme is not None for e in self.entries)

    @property
    def total(self) -> int:
        return len(self.entries)

    def __str__(self) -> str:
        rows = [
            (e.match.name, e.match.node.name, e.shape, e.scheme or "float", e.reason)
            for e in self.entries
        ]
        head = ("module", "node", "MxKxN", "scheme", "reason")
        table = tabulate(rows, head, disable_numparse=True)
        return f"{table}\n{self.quantized} of {self.total} matmuls in int8"


def decide(matches: Sequence[Match], config: Config, cost: CostModel | None) -> Plan:
    """The plan of one graph. `cost` None: no measurements are at hand, every legal site is int8."""
    found = recipes(config.recipe, matches)
    return Plan(tuple(_entry(match, config, cost, found.get(match.node)) for match in matches))


def _entry(
    match: Match, config: Config, cost: CostModel | None, recipe: SiteRecipe | None
) -> Entry:
    if isinstance(match, Unmatched):
        return Entry(match, None, match.reason)
    for pattern in config.skip:
        if fits(pattern, names(match)):
            return Entry(match, None, f"skipped by the pattern {pattern!r}")
    if config.only and not any(fits(p, names(match)) for p in config.only):
        return Entry(match, None, f"not among only={list(config.only)}")
    if isinstance(match, Product | Attention):
        return _decode_by_cost(match, cost) or _product_by_cost(match, config, cost)
    return _by_recipe(match, recipe) if recipe else _by_cost(match, config, cost)


def _by_recipe(site: Site, recipe: SiteRecipe) -> Entry:
    why_not = recipe.scheme and _impossible(site, recipe.scheme)
    if recipe.scheme is None or why_not:
        return Entry(site, None, why_not or recipe.reason or "left float by the recipe")
    return Entry(site, recipe.scheme, recipe.reason or "by the recipe", recipe=recipe)


def _impossible(site: Site, scheme: Scheme) -> str | None:
    """Why this site cannot have this scheme, or None."""
    if site.trains and scheme.why_no_gradient:
        return scheme.why_no_gradient
    if scheme.grouped and not site.k:
        return f"{scheme}: K is 0 or not known, so the weight cannot be cut into groups"
    return None


def _product_by_cost(match: Product | Attention, config: Config, cost: CostModel | None) -> Entry:
    """All operands are quantized at every call, so this has to gain, whatever `minimum_gain`."""
    attends, wanted = isinstance(match, Attention), max(config.minimum_gain, 1.0)
    what = "an attention" if attends else "a matmul of two activations"
    scheme = config.schemes[0]
    if not scheme.fits_activations:
        return Entry(match, None, f"{what}, which {scheme} does not serve")
    batch, m, k, n = (hint(s) for s in (match.batch, match.m, match.k, match.n))
    if cost is None or batch is None or m is None or k is None or n is None:
        return Entry(match, None, f"{what} whose gain was not predicted")
    predict = cost.estimate_attention if attends else cost.estimate_bmm
    estimate = predict(batch, m, k, n, match.dtype)
    if estimate.gain < wanted:
        reason = f"{what}: int8 would be {estimate.gain:.2f}x float, below {wanted}"
        return Entry(match, None, reason, estimate)
    scheme = replace(scheme, rotation=0)
    return Entry(match, scheme, f"int8 predicted {estimate.gain:.2f}x float", estimate)


def _decode_by_cost(match: Product | Attention, cost: CostModel | None) -> Entry | None:
    """One query reads keys and values once, in float as fast as int8 could quantize them."""
    batch, k, n = (hint(size) for size in (match.batch, match.k, match.n))
    one = isinstance(match, Attention) and type(match.m) is int and match.m == 1
    if not one or cost is None or batch is None or k is None or n is None:
        return None
    gain = cost.estimate_decode(batch, k, n, match.dtype)
    if gain < 1:
        return None
    reason = f"an attention of one query: float, attention_decode predicted {gain:.2f}x PyTorch's"
    return Entry(match, None, reason, decodes=True)


def _by_cost(site: Site, config: Config, cost: CostModel | None) -> Entry:
    m, dtype = hint(site.m), site.out_dtype or torch.float32
    schemes = config.schemes
    if why_not := _impossible(site, schemes[0]):
        return Entry(site, None, why_not)
    if schemes[0].calibrated:
        return Entry(site, None, f"{schemes[0]}: the recipe does not name it")
    if cost is None or m is None or site.k is None or site.n is None:
        return Entry(site, schemes[0], "int8; its gain was not predicted")
    estimates = [_estimate(site, m, dtype, s, cost) for s in schemes]
    fastest = min(e.int8_s for e in estimates)
    scheme, estimate = next(
        (s, e)
        for s, e in zip(schemes, estimates, strict=True)
        if e.int8_s <= fastest * (1 + ACCURACY_BUDGET)
    )
    where = _where(site, config, cost, scheme)
    only = "" if where in (None, sympy.true, sympy.false) else f"; int8 where {where}"
    if estimate.gain < config.minimum_gain:
        reason = (
            f"int8 would be {estimate.gain:.2f}x float, below minimum_gain={config.minimum_gain}"
        )
        return Entry(site, None, reason + only, estimate, where)
    reason = f"int8 predicted {estimate.gain:.2f}x float"
    if len(schemes) > 1 and scheme.x is not None:
        reason += _why_symmetry(scheme.x, estimates[0].int8_s / estimates[-1].int8_s - 1)
    return Entry(site, scheme, reason + only, estimate, where)


def _estimate(site: Site, m: int, dtype: torch.dtype, scheme: Scheme, cost: CostModel) -> Estimate:
    """Of the forward; a weight that trains is quantized again and again."""
    assert site.k is not None and site.n is not None
    found = cost.estimate(m, site.k, site.n, dtype, scheme)
    if not site.weight_trains:
        return found
    return replace(found, int8_s=found.int8_s + cost.training(m, site.k, site.n, dtype))


def _where(site: Site, config: Config, cost: CostModel, scheme: Scheme) -> sympy.Basic | None:
    """The break-even in the site's symbolic M."""
    if not isinstance(site.m, torch.SymInt):
        return None
    dtype = site.out_dtype or torch.float32

    def gains(m: int) -> bool:
        return _estimate(site, m, dtype, scheme, cost).gain >= config.minimum_gain

    return condition(site.m, gains)


def guard_sizes(plan: Plan) -> None:
    """Ties the captured graph to the sizes for which the decisions of the plan are right."""
    for entry in plan.entries:
        if entry.where is not None and isinstance(entry.match, Site):
            assert isinstance(entry.match.m, torch.SymInt)
            guard(entry.match.m, entry.where)


def _why_symmetry(x: QSpec, extra: float) -> str:
    if x.symmetric:
        return f", symmetric: a zero point would cost {extra:.1%} time"
    return f", zero point for {max(extra, 0):.1%} time"


def hint(size: int | torch.SymInt | None) -> int | None:
    """The size a symbolic dimension had in the captured call; adds no guard."""
    if isinstance(size, torch.SymInt):
        seen = size.node.hint
        return None if seen is None else int(seen)
    return size


def names(match: Match) -> tuple[str, ...]:
    """The names patterns are matched against: call site's module path and parameter name."""
    if isinstance(match, Site):
        # a tied weight has one name, but is also what the calling module calls it
        called = f"{match.path}.{match.parameter.rpartition('.')[2]}" if match.path else ""
        return tuple(n for n in (match.path, match.parameter, called) if n)
    return (match.path,) if match.path else ()


def fits(pattern: str, candidates: Iterable[str]) -> bool:
    """Whether the pattern equals a run of whole components of a dotted name, wildcards allowed."""
    shapes = (pattern, f"*.{pattern}", f"{pattern}.*", f"*.{pattern}.*")
    return any(fnmatch.fnmatchcase(name, shape) for name in candidates for shape in shapes)


def recipes(recipe: Recipe | None, matches: Sequence[Match]) -> dict[fx.Node, SiteRecipe]:
    """The recipe of each site it names, by the site's matmul.

    Raises ValueError for a site that has another N or K in the model.
    """
    given = {(s.name, s.call): s for s in recipe.sites} if recipe else {}
    calls = Counter[str]()
    found = {}
    for site in (m for m in matches if isinstance(m, Site)):
        named = given.get((site.name, calls[site.name]))
        calls[site.name] += 1
        if named is None:
            continue
        if (site.n or named.n, site.k or named.k) != (named.n, named.k):
            raise ValueError(
                f"recipe: {named} has K={named.k} and N={named.n} there, but K={site.k} and "
                f"N={site.n} in the model"
            )
        found[site.node] = named
    return found


def check_names(config: Config, known: Iterable[str]) -> None:
    """Raises ValueError for a pattern or a recipe's site that fits none of the `known` names, and
    for a scheme that lacks its recipe."""
    known = sorted(set(known))
    listed = ", ".join(known[:50]) + (" ..." if len(known) > 50 else "")
    for option in ("skip", "only"):
        for pattern in getattr(config, option):
            if not fits(pattern, known):
                raise ValueError(
                    f"{option}: the pattern {pattern!r} matches nothing; there is: {listed}"
                )
    if config.recipe is None and config.schemes[0].calibrated:
        raise ValueError(
            f"the scheme {config.scheme} has static scales, which only a recipe holds: give one, "
            'options={"recipe": qfx.calibrate(model, batches)}'
        )
    missing = [s.name for s in config.recipe.sites if s.name not in known] if config.recipe else []
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise ValueError(
            f"recipe: the model has no {', '.join(missing[:5])}{more}; there is: {listed}"
        )
