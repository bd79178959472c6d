"""Experts in calibration: each expert of a product is a group with the tokens that it gets, and all
experts of a product get one scheme, so that they are chosen together.

A product of experts takes no smoothing factor and no outliers: its operators quantize each token
once for all of its experts, without a factor.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from qfx.calibration.record import SharedInput, Transform
from qfx.calibration.search import Candidate, bytes_of, errors_of, times_of
from qfx.cost.model import CostModel
from qfx.match.selection import SiteKey
from qfx.nn.experts_like import is_experts, products_of, why_no_experts_scheme
from qfx.values.rounding import Rounding
from qfx.values.scheme import Scheme
from qfx.values.site_recipe import SiteRecipe
from qfx.weights.model_restore import module_of
from qfx.weights.recipe_codes import digest_of_experts

LEAST_TOKENS = 16  # for GPTQ of an expert: with fewer it gains little or nothing on other tokens
_SHOWN = 8  # experts in a reason

Groups = Mapping[SiteKey, SharedInput]


def units_of(groups: Groups) -> list[list[SiteKey]]:
    """Returns the keys of the groups that get one scheme, in order: each group by itself, and all
    experts of a product together."""
    found: dict[tuple[SiteKey, bool], list[SiteKey]] = {}
    for key, group in groups.items():
        unit = (key, False) if group.product is None else (group.product, True)
        found.setdefault(unit, []).append(key)
    return list(found.values())


def expert_candidates(
    experts: Sequence[SharedInput],
    schemes: Sequence[Scheme],
    observer: str,
    cost: CostModel,
    minimum_gain: float,
) -> list[list[Candidate]]:
    """Returns the candidates of each expert of a product, as `candidates` does, for the same
    schemes in the same order. Schemes that do not serve experts are left out; `minimum_gain` is of
    all experts together."""
    nothing, reasons = Transform(), [why_no_experts_scheme(s) for s in schemes]
    served = [s for s, why in zip(schemes, reasons, strict=True) if not why]
    times = [_times(experts, scheme, cost) for scheme in schemes]
    gains = {s: _gain(t) for s, t in zip(schemes, times, strict=True) if s in served}
    least = f"int8 would be {max(gains.values(), default=0.0):.2f}x float"
    enough = [s for s, gain in gains.items() if gain >= minimum_gain]
    why = "" if enough else least if served else reasons[0]
    found = []
    for i, group in enumerate(experts):
        each = [Candidate(None, nothing, (0.0,), times[0][i][0], why, bytes=bytes_of(group, None))]
        for scheme, of_experts in zip(schemes, times, strict=True):
            if scheme in enough:
                transform = Transform(None, scheme.block(group.activation.k))
                made = Candidate(scheme, transform, (), of_experts[i][1])
                errors = errors_of(group, made, observer)
                each.append(replace(made, errors=errors, bytes=bytes_of(group, scheme)))
        found.append(each)
    return found


def _times(
    experts: Iterable[SharedInput], scheme: Scheme, cost: CostModel
) -> list[tuple[float, float]]:
    """Returns the predicted seconds of each expert, in float and in int8. One that gets less than
    one token a call runs in that share of the calls."""
    found = []
    for group in experts:
        share = min(group.activation.rows / max(group.activation.calls, 1), 1.0)
        in_float, int8_s = times_of(group, scheme, cost)
        found.append((share * in_float, share * int8_s))
    return found


def _gain(times: Sequence[tuple[float, float]]) -> float:
    in_float, int8_s = (sum(column) for column in zip(*times, strict=True))
    return in_float / int8_s if int8_s else math.inf


def merged(each: Sequence[Candidate], experts: Sequence[SharedInput]) -> Candidate:
    """Returns one candidate for all experts of a product, from theirs. Its error is the mean of
    theirs, weighted by the tokens that they get."""
    if len(each) == 1 and experts[0].product is None:
        return each[0]
    tokens = [group.activation.rows for group in experts]
    pairs = [(n, c.error) for n, c in zip(tokens, each, strict=True) if n]
    error = sum(n * error for n, error in pairs) / max(sum(tokens), 1)
    known = all(c.divergences for c in each)
    return replace(
        each[0],
        errors=(error,),
        seconds=sum(c.seconds for c in each),
        reason=each[0].reason if each[0].scheme is None else few_tokens(each),
        divergences=(sum(sum(c.divergences) for c in each),) if known else (),
        bytes=sum(c.bytes for c in each),
        roundings=(),
    )


def joined(
    units: Iterable[Sequence[SiteKey]], found: Mapping[SiteKey, Sequence[Candidate]], groups: Groups
) -> list[list[Candidate]]:
    """Returns the candidates of each unit, from those of its groups."""
    return [
        [
            merged(each, [groups[key] for key in unit])
            for each in zip(*(found[key] for key in unit), strict=True)
        ]
        for unit in units
    ]


def few(rows: int) -> str:
    """Returns why GPTQ does not round an expert that saw so many tokens; '' if it does."""
    return "" if rows >= LEAST_TOKENS else f"{rows}"


def few_tokens(each: Sequence[Candidate]) -> str:
    """Returns which experts are rounded to nearest because they saw few tokens; '' if none."""
    found = [f"{e} ({c.reason})" for e, c in enumerate(each) if c.reason]
    if not found:
        return ""
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return (
        f"{len(found)} of {len(each)} experts saw fewer than {LEAST_TOKENS} tokens and are rounded "
        f"to nearest: {', '.join(found[:_SHOWN])}{more}"
    )


def expert_recipe(
    key: SiteKey, experts: Sequence[SharedInput], each: Sequence[Candidate]
) -> SiteRecipe:
    """Returns the entry of a recipe for a product of experts."""
    whole, (n, k) = merged(each, experts), experts[0].readers[0].w_nk.shape
    error, divergence = whole.error, whole.divergences[0] if whole.divergences else None
    return SiteRecipe(
        *key,
        n=n,
        k=k,
        scheme=whole.scheme,
        sqnr_db=round(-10 * math.log10(error), 2) if error > 0 else None,
        reason=whole.reason,
        rounding=_rounding(key, [c.roundings[0] for c in each if c.roundings]),
        divergence=None if divergence is None or not whole.scheme else float(f"{divergence:.3g}"),
        tokens=tuple(group.activation.rows for group in experts),
    )


def _rounding(key: SiteKey, each: Sequence[Rounding]) -> Rounding | None:
    """Returns the codes of all experts of a product as one value; None if they have none."""
    if not each:
        return None
    digest = digest_of_experts(rounding.weight for rounding in each)
    codes = torch.stack([rounding.codes for rounding in each])
    return Rounding(key[0] if not key[1] else f"{key[0]}[{key[1]}]", each[0].method, digest, codes)


def warn_of_unseen(
    model: Callable[..., Any], groups: Groups, left_out: Callable[[str], Any]
) -> None:
    """Warns of blocks of experts whose products were in no captured graph, so that the recipe says
    nothing about them. `left_out`: whether the patterns of the config exclude a name."""
    root = module_of(model)
    seen = {group.product[0] for group in groups.values() if group.product}
    blocks = root.named_modules() if isinstance(root, nn.Module) else ()
    missed = [
        name
        for name, module in blocks
        if is_experts(module)
        and not left_out(name)
        and not any(f"{name}.{p.name}".lstrip(".") in seen for p in products_of(module))
    ]
    if missed:
        warnings.warn(
            f"qfx.calibrate: {len(missed)} blocks of experts multiply in no captured graph, and "
            f"the recipe does not name them: {', '.join(missed[:5])}. A model of transformers is "
            "captured with model.set_experts_implementation('grouped_mm'), its default",
            stacklevel=3,
        )
