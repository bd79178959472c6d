"""Policy: gives every matmul a scheme, or the reason why it stays float.

The inputs are matches, configuration and costs. All policy is here, and it can be tested without
kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import singledispatch
from typing import NamedTuple

from qfx.cost.model import CostModel, Costs, GpuCosts, Work
from qfx.graph.faults import at
from qfx.host.shapes import hint
from qfx.match.attention import Attention
from qfx.match.base import Match, Unmatched
from qfx.match.experts import ExpertProduct
from qfx.match.grouped import GroupedConvolution
from qfx.match.operator_calls import OwnCall
from qfx.match.products import Product
from qfx.match.recurrent import RecurrentSteps, why_no_steps
from qfx.match.selection import pinned, recipes, why_apart
from qfx.match.site import Site
from qfx.ops.attention import rotation_of_heads
from qfx.ops.forms import GUARDED, LSTM, form_of
from qfx.ops.guard_counts import Guard
from qfx.plan.by_cost import by_cost
from qfx.plan.exclusions import impossible, unguardable, why_excluded, why_nearest
from qfx.plan.experts import decide_experts, experts_by_recipe
from qfx.plan.grouped import decide_groups
from qfx.plan.plan import Entry, Plan
from qfx.values.config import Config
from qfx.values.limits import why_few_features
from qfx.values.scheme import QSpec, Scheme
from qfx.values.select import left_out
from qfx.values.site_recipe import PinnedProduct, SiteRecipe

FEW_QUERIES = 512  # up to this many read an int8 cache as codes, more read it as floats


def decide(
    matches: Sequence[Match],
    config: Config,
    cost: CostModel | None,
    gpu_costs: GpuCosts | None = None,
    factors: Callable[[Site], tuple[float, ...] | str | None] = lambda site: None,
) -> Plan:
    """Returns the plan of one graph. `cost`: the cost model of the CPU. `gpu_costs`: the cost
    models of GPUs. Both may be None (no measurements): then every matmul with a weight that int8
    supports is int8. `factors`: returns the smoothing factors of a matmul that no recipe decides,
    or the reason why it has none."""
    price, found = Costs(cost, gpu_costs), recipes(config.recipe, matches)
    products = pinned(config.recipe, matches)

    def decided(match: Match) -> Entry:
        recipe, product = found.get(match.node), products.get(match.node)
        with at(match.node):
            left = left_out(config, match.names)
            return _entry(match, _Criteria(config, price, recipe, product, left, factors))

    return Plan(tuple(_guarded(decided(match), config) for match in matches))


class _Criteria(NamedTuple):
    """The inputs of a decision besides the match. `recipe`, `product`: the entry of the recipe for
    this match. `left`: the reason why the patterns leave it float, None if they do not."""

    config: Config
    costs: Costs
    recipe: SiteRecipe | None
    product: PinnedProduct | None
    left: str | None
    factors: Callable[[Site], tuple[float, ...] | str | None]

    @property
    def pinned(self) -> bool:
        """Whether the recipe is a whole plan, so that no prediction decides."""
        return self.config.recipe is not None and self.config.recipe.pinned is not None


@singledispatch
def _entry(match: Match, criteria: _Criteria) -> Entry:
    raise NotImplementedError(f"no policy for {type(match).__name__}")


@_entry.register
def _(match: Unmatched, criteria: _Criteria) -> Entry:
    return Entry(match, None, match.reason)


@_entry.register
def _(match: OwnCall, criteria: _Criteria) -> Entry:
    though = f", though {criteria.left}" if criteria.left else ""
    return Entry(match, None, match.reason + though)


@_entry.register
def _(match: Site, criteria: _Criteria) -> Entry:
    if why_not := criteria.left or why_apart(criteria.config, match):
        return Entry(match, None, why_not)
    if criteria.recipe:
        return _by_recipe(match, criteria.recipe)
    if criteria.pinned:
        return Entry(match, None, _NOT_PINNED)
    if why_not := why_excluded(match):
        return Entry(match, None, why_not)
    return _smoothed(by_cost(match, criteria.config, criteria.costs), match, criteria)


@_entry.register
def _(match: ExpertProduct, criteria: _Criteria) -> Entry:
    if why_not := criteria.left or (criteria.pinned and not criteria.recipe and _NOT_PINNED):
        return Entry(match, None, why_not)
    if criteria.recipe:
        return experts_by_recipe(match, criteria.recipe)
    return decide_experts(match, criteria.config, criteria.costs)


@_entry.register
def _(match: GroupedConvolution, criteria: _Criteria) -> Entry:
    if why_not := criteria.left or (criteria.pinned and _NOT_PINNED) or why_excluded(match.site):
        return Entry(match, None, why_not)
    return decide_groups(match, criteria.config, criteria.costs)


@_entry.register
def _(match: RecurrentSteps, criteria: _Criteria) -> Entry:
    if criteria.left or criteria.pinned:
        return Entry(match, None, criteria.left or _NOT_PINNED)
    scheme = criteria.config.chosen.at(match.k)
    if why_not := why_no_steps(scheme) or why_few_features(match.k) or LSTM.lacking(match.device):
        return Entry(match, None, why_not)
    return Entry(match, scheme, "int8: one operator runs all steps, with its weight in the caches")


@_entry.register
def _(match: Product, criteria: _Criteria) -> Entry:
    if criteria.left:
        return Entry(match, None, criteria.left)
    if criteria.pinned:
        return _as_pinned(match, criteria.product)
    if why_not := why_excluded(match):
        return Entry(match, None, why_not)
    return _by_gain(match, "a matmul of two activations", "products", criteria)


@_entry.register
def _(match: Attention, criteria: _Criteria) -> Entry:
    if match.trains:
        return _of_training(match, criteria)
    if type(match.m) is int and match.m <= FEW_QUERIES and match.cache is not None:
        return Entry(match, None, "an attention over int8 keys and values", decodes=True)
    if criteria.left:
        return Entry(match, None, criteria.left)
    if criteria.pinned:
        return _as_pinned(match, criteria.product)
    decodes = _decode_by_cost(match, criteria.costs.of(match, "decodes", None))
    return decodes or _by_gain(match, "an attention", "attentions", criteria)


def _of_training(match: Attention, criteria: _Criteria) -> Entry:
    """Returns the decision on an attention whose gradient is recorded."""
    if why_not := criteria.left or (criteria.pinned and _NOT_PINNED):
        return Entry(match, None, why_not)
    if criteria.config.chosen.backward != "int8":
        reason = 'an attention: its gradient is recorded, and is int8 with backward="int8" alone'
        return Entry(match, None, reason)
    return _by_gain(match, "an attention and its gradients", "attention_steps", criteria)


_NOT_PINNED = "the pinned plan does not name it"


def _as_pinned(match: Product | Attention, product: PinnedProduct | None) -> Entry:
    if product is None:
        return Entry(match, None, _NOT_PINNED)
    if product.decodes and not _asks_one(match):
        return Entry(match, None, "pinned to attention_decode, which serves one query")
    scheme = product.scheme and _taken(match, product.scheme)
    return Entry(match, scheme, "by the pinned plan", decodes=product.decodes)


def _asks_one(match: Match) -> bool:
    return isinstance(match, Attention) and type(match.m) is int and match.m == 1


def _guarded(entry: Entry, config: Config) -> Entry:
    """Returns the entry with the guard that the option `guard` requests, or with the reason why it
    has none."""
    if config.guard is None or entry.scheme is None:
        return entry
    guards = entry.match.weights and form_of(entry.scheme).guards
    if guards and (lacking := GUARDED.lacking(entry.match.device)):
        return Entry(entry.match, None, f"guard={config.guard}: {lacking}")
    if why_not := unguardable(entry, entry.scheme):
        return replace(entry, reason=f"{entry.reason}; not guarded: {why_not}")
    guard = Guard(float(config.guard), entry.match.name)
    return replace(entry, reason=f"{entry.reason}; guarded", guard=guard)


def _by_recipe(site: Site, recipe: SiteRecipe) -> Entry:
    if recipe.scheme is None:
        return Entry(site, None, recipe.reason or "left float by the recipe")
    scheme, reason = recipe.scheme.at(site.k, site.channels), recipe.reason or "by the recipe"
    if why_not := impossible(site, scheme):
        return Entry(site, None, why_not)
    if recipe.outliers:
        if site.trains:
            return Entry(site, None, f"{scheme} with outliers in float has no gradient")
        reason += f"; {len(recipe.outliers)} of {recipe.k} features in float"
    if recipe.rounding and (why_not := why_nearest(site)):
        recipe, reason = replace(recipe, rounding=None), f"{reason}; {why_not}"
    elif recipe.rounding:
        reason += f"; {recipe.rounding}"
    return Entry(site, scheme, reason, recipe=recipe)


def _smoothed(entry: Entry, site: Site, criteria: _Criteria) -> Entry:
    """Returns the entry with the smoothing factor of the matmul's input, if the input is rotated,
    so that multiplying by the factor needs no pass of its own. While gradients are recorded there
    is no factor, because the weights may change."""
    scheme = entry.scheme
    if scheme is None or not criteria.config.smoothing or not scheme.smooths or site.trains:
        return entry
    factor = criteria.factors(site)
    if isinstance(factor, str):
        return replace(entry, reason=f"{entry.reason}; smoothing not used: {factor}")
    if factor is None or site.n is None:
        return entry
    recipe = SiteRecipe(site.name, 0, site.n, len(factor), scheme, factor)
    return replace(entry, reason=f"{entry.reason}; smoothed", recipe=recipe)


def _by_gain(match: Product | Attention, what: str, kind: str, criteria: _Criteria) -> Entry:
    """Returns the decision on a matmul of two activations or an attention. All operands are
    quantized at every call, so the gain has to be at least 1, whatever `minimum_gain`."""
    scheme, wanted = criteria.config.chosen, max(criteria.config.minimum_gain, 1.0)
    cost = criteria.costs.of(match, kind, None)
    if not scheme.fits_activations:
        return Entry(match, None, f"{what}, which {scheme} does not serve")
    if isinstance(cost, str):
        return Entry(match, None, f"{what}: {cost}")
    batch, m, k, n = (hint(s) for s in (match.batch, match.m, match.k, match.n))
    if cost is None or batch is None or m is None or k is None or n is None:
        return Entry(match, None, f"{what} whose gain was not predicted")
    estimate = cost.estimate(Work(kind, m, k, n, match.dtype, batch))
    if estimate.gain < wanted:
        reason = f"{what}: int8 would be {estimate.text}, below {wanted}"
        return Entry(match, None, reason, estimate)
    taken = _taken(match, scheme)
    return Entry(match, taken, f"int8 predicted {estimate.text}", estimate)


@singledispatch
def _taken(match: Match, scheme: Scheme) -> Scheme:
    """Returns the part of the scheme that applies to two activations."""
    return Scheme(x=scheme.x, w=QSpec(bits=scheme.w.bits))


@_taken.register
def _(match: Attention, scheme: Scheme) -> Scheme:
    """Returns the scheme of queries and keys: whatever the configured scheme, (A3) fixes it."""
    return Scheme(rotation=rotation_of_heads(hint(match.k)))


def _decode_by_cost(match: Attention, cost: CostModel | str | None) -> Entry | None:
    """Returns the decision to compute an attention of one query by `attention_decode`, if that is
    predicted to gain; otherwise None. This operator reads keys and values once, in float, as fast
    as int8 could quantize them."""
    batch, k, n = (hint(size) for size in (match.batch, match.k, match.n))
    one = _asks_one(match)
    if not one or cost is None or isinstance(cost, str) or batch is None or k is None or n is None:
        return None
    gain = cost.estimate(Work("decodes", 1, k, n, match.dtype, batch)).gain
    if gain < 1:
        return None
    reason = f"an attention of one query: float, attention_decode predicted {gain:.2f}x PyTorch's"
    return Entry(match, None, reason, decodes=True)
