"""Decision on a product of experts: int8 if the matmuls of its experts are predicted to gain."""

from __future__ import annotations

from dataclasses import replace

import torch

from qfx.cost.model import Costs, Work
from qfx.host.shapes import hint
from qfx.match.experts import ExpertProduct
from qfx.ops.forms import EXPERTS, form_of, why_no_gradient
from qfx.plan.exclusions import why_nearest
from qfx.plan.plan import Entry
from qfx.values.config import Config
from qfx.values.limits import why_few_features
from qfx.values.scheme import PER_COLUMN, Scheme
from qfx.values.site_recipe import SiteRecipe


def decide_experts(match: ExpertProduct, config: Config, costs: Costs) -> Entry:
    """Returns the decision. It is that of a matmul with the rows of one expert, if all experts have
    equally many; for a symbolic number of rows, those of the captured call."""
    scheme = config.chosen.at(match.k)
    if why_not := why_float_experts(match, scheme) or why_few_features(match.k):
        return Entry(match, None, why_not)
    if config.release_weights and not match.site.repacked and not match.site.weight_trains:
        return Entry(match, scheme, "int8 whatever it gains: release_weights keeps no float weight")
    cost = costs.of(match, form_of(scheme).name, scheme)
    m = hint(match.m)
    if config.minimum_gain == 0:
        return Entry(match, scheme, "int8 whatever it gains: minimum_gain=0")
    if cost is None or isinstance(cost, str) or m is None:
        return Entry(match, scheme, "int8; its gain was not predicted")
    rows, hit = max(m // match.experts, 1), min(m, match.experts)
    work = Work.linear(rows, match.k, match.n, match.float_type, scheme)
    one = cost.estimate(work)
    more = cost.training(work) if match.site.weight_trains else 0.0
    estimate = replace(one, float_s=hit * one.float_s, int8_s=hit * (one.int8_s + more))
    each = f" for {rows} of {m} rows to each of {hit} experts"
    if estimate.gain < config.minimum_gain:
        below = f"below minimum_gain={config.minimum_gain}"
        return Entry(match, None, f"int8 would be {estimate.text}{each}, {below}", estimate)
    return Entry(match, scheme, f"int8 predicted {estimate.text}{each}", estimate)


def experts_by_recipe(match: ExpertProduct, recipe: SiteRecipe) -> Entry:
    """Returns the decision of a recipe on a product of experts."""
    if recipe.scheme is None:
        return Entry(match, None, recipe.reason or "left float by the recipe")
    scheme, reason = recipe.scheme.at(match.k), recipe.reason or "by the recipe"
    given = recipe.factor is not None or recipe.outliers
    why_not = "a product of experts, which takes no factor or outliers of a recipe" if given else ""
    if why_not := why_float_experts(match, scheme) or why_not:
        return Entry(match, None, why_not)
    if recipe.rounding and (nearest := why_nearest(match.site)):
        recipe, reason = replace(recipe, rounding=None), f"{reason}; {nearest}"
    elif recipe.rounding:
        reason += f"; {recipe.rounding}"
    return Entry(match, scheme, reason, recipe=recipe)


def why_float_experts(match: ExpertProduct, scheme: Scheme) -> str | None:
    """Returns why a product of experts cannot be int8 with this scheme, or None if it can."""
    if match.trains and (why_not := why_no_gradient(scheme, match.site.weight_trains)):
        return why_not
    if lacking := EXPERTS.lacking(match.device):
        return f"a product of experts: {lacking}"
    if scheme.x is None or scheme.calibrated or scheme.w.axes == PER_COLUMN:
        return f"a product of experts, which {scheme} does not serve"
    if match.float_type not in (torch.float32, torch.bfloat16, torch.float16):
        return f"a product of experts in {match.float_type}"
    return None
