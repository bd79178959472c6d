"""Decision on a convolution in groups of channels: that of a matmul with as many products, if the
operator serves the scheme."""

from __future__ import annotations

from dataclasses import replace

from qfx.cost.model import Costs
from qfx.match.grouped import GroupedConvolution
from qfx.ops.forms import CONV, form_of
from qfx.plan.by_cost import by_cost
from qfx.plan.depthwise import decide_depthwise
from qfx.plan.plan import Entry
from qfx.values.config import Config
from qfx.values.limits import why_few_features
from qfx.values.scheme import PER_COLUMN, Scheme


def decide_groups(match: GroupedConvolution, config: Config, costs: Costs) -> Entry:
    """Returns the decision."""
    if match.depthwise:
        return decide_depthwise(match, config, costs)
    scheme = config.chosen.at(match.k)
    if why_not := why_float_groups(match, scheme) or why_few_features(match.k):
        return Entry(match, None, why_not)
    return replace(by_cost(match.site, config, costs), match=match)


def why_float_groups(match: GroupedConvolution, scheme: Scheme) -> str | None:
    """Returns why a convolution in groups cannot be int8 with this scheme, or None if it can."""
    if match.trains:
        return "a convolution in groups, which has no gradient in int8"
    if lacking := CONV.lacking(match.device):
        return f"a convolution in groups: {lacking}"
    per_column = scheme.w.axes == PER_COLUMN  # which needs a factor of x for each group
    if scheme.x is None or scheme.calibrated or per_column or not form_of(scheme).gemm:
        return f"a convolution in groups, which {scheme} does not serve"
    return None
