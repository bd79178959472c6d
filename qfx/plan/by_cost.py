"""Decision by cost for a matmul that no pattern and no recipe decides: int8 if its predicted gain
is large enough."""

from __future__ import annotations

from dataclasses import replace

import sympy
import torch

from qfx.cost.model import CostModel, Costs, Estimate, Work
from qfx.graph.faults import at
from qfx.host.shapes import hint
from qfx.match.site import Site
from qfx.ops.forms import form_of
from qfx.plan.breakeven import condition, holds_for_captured, why_untied
from qfx.plan.exclusions import impossible
from qfx.plan.plan import Entry, Plan
from qfx.values.config import Config
from qfx.values.scheme import Scheme


def by_cost(site: Site, config: Config, costs: Costs) -> Entry:
    """Returns the decision on a matmul with a weight: the scheme of the configuration, or the
    reason why the matmul stays float, with the predicted seconds."""
    m, dtype = hint(site.m), site.out_dtype or torch.float32
    scheme = config.chosen.at(site.k, site.channels)
    if why_not := impossible(site, scheme):
        return Entry(site, None, why_not)
    if scheme.calibrated:
        return Entry(site, None, f"{config.chosen}: the recipe does not name it")
    released = config.release_weights and site.device.type == "cpu"
    if released and not site.weight_trains and not site.repacked:
        return Entry(site, scheme, "int8 whatever it gains: release_weights keeps no float weight")
    cost = costs.of(site, form_of(scheme).name, scheme)
    if isinstance(cost, str):
        return _unpriced(site, config, scheme, cost)
    if cost is None or site.m is None or site.k is None or site.n is None:
        return Entry(site, scheme, "int8; its gain was not predicted")
    if config.minimum_gain == 0:  # nothing is measured that has no effect on the decision
        return Entry(site, scheme, "int8 whatever it gains: minimum_gain=0")
    where, only = _where(site, config, cost, scheme)
    if m is None:
        return _by_range(site, config, scheme, where, only)
    estimate = _estimate(site, m, dtype, scheme, cost)
    if site.repacked:
        only += f"; its weight is packed at every call: {site.repacked}"
    if estimate.gain < config.minimum_gain:
        reason = f"int8 would be {estimate.text}, below minimum_gain={config.minimum_gain}"
        return Entry(site, None, reason + only, estimate, where)
    reason = f"int8 predicted {estimate.text}"
    return Entry(site, scheme, reason + only, estimate, where)


def _unpriced(site: Site, config: Config, scheme: Scheme, why: str) -> Entry:
    """Returns the decision for a GPU without measurements: int8 only if `minimum_gain` is 0."""
    if config.minimum_gain == 0:
        return Entry(site, scheme, f"int8; {why}")
    remedy = "run python -m benchmarks.gpu, or set minimum_gain=0"
    return Entry(site, None, f"{why}; {remedy}")


def _estimate(site: Site, m: int, dtype: torch.dtype, scheme: Scheme, cost: CostModel) -> Estimate:
    """Returns the predicted seconds of a matmul with `m` rows in float and in int8, including the
    packing of the weight if every call packs it. Zero rows count as one."""
    assert site.k is not None and site.n is not None
    work = Work.linear(max(m, 1), site.k, site.n, dtype, scheme)
    if site.channels is not None:
        block = scheme.block(site.k)
        whole = not block or site.channels % block == 0
        work = replace(work, pixels=site.pixels, gathered=not whole)
    found, more = cost.estimate(work), 0.0
    if site.weight_trains:
        more = cost.training(work)
    elif site.repacked:
        more = cost.packing(work)
    return replace(found, int8_s=found.int8_s + more)


def _where(
    site: Site, config: Config, cost: CostModel, scheme: Scheme
) -> tuple[sympy.Basic | None, str]:
    """Returns the condition on a symbolic M under which int8 gains enough, and its description in
    words. The condition is None if M is a number or no guard can test it."""
    if not isinstance(site.m, torch.SymInt):
        return None, ""
    dtype = site.out_dtype or torch.float32

    def gains(m: int) -> bool:
        return _estimate(site, m, dtype, scheme, cost).gain >= config.minimum_gain

    where = condition(site.m, gains)
    if where in (sympy.true, sympy.false):
        return where, ""
    why_not = why_untied(site.m, where)
    words = f"; int8 where {where}"
    return (where, words) if why_not is None else (None, f"{words}, not guarded: {why_not}")


def _by_range(
    site: Site, config: Config, scheme: Scheme, where: sympy.Basic | None, only: str
) -> Entry:
    """Returns the decision for an M that is unknown in the captured call, based on the range of
    M."""
    every = f"minimum_gain={config.minimum_gain} for every M that can occur"
    if where is None:
        return Entry(site, scheme, f"int8; its gain was not predicted{only}")
    if where == sympy.true:
        return Entry(site, scheme, f"int8 predicted to reach {every}", where=where)
    return Entry(site, None, f"int8 would be below {every}", where=where)


def tie_to_sizes(plan: Plan) -> None:
    """Adds guards by which Dynamo reuses the captured graph only for sizes for which the decisions
    of the plan are right."""
    for entry in plan.entries:
        if entry.where is not None:
            assert isinstance(entry.match.m, torch.SymInt)
            with at(entry.match.node):
                holds_for_captured(entry.match.m, entry.where)
