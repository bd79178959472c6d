"""The entries of the recipe that calibration returns: one for each matmul, and one for each product
of experts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from qfx.calibration.experts import expert_recipe
from qfx.calibration.record import SharedInput
from qfx.calibration.rounding import Chosen
from qfx.match.selection import SiteKey
from qfx.values.site_recipe import SiteRecipe


def entries(
    groups: Mapping[SiteKey, SharedInput],
    units: Sequence[Sequence[SiteKey]],
    chosen: Chosen,
    ranges: Mapping[SiteKey, tuple[float, int] | None],
) -> Iterator[SiteRecipe]:
    """Yields the entry of each matmul, from the candidates `chosen` for the groups, and the static
    scales and zero points of their inputs (`ranges`). `units`: the keys of the groups that get one
    scheme, in order."""
    for unit in units:
        key, group, candidate = unit[0], groups[unit[0]], chosen[unit[0]]
        if group.product is not None:
            each = [groups[k] for k in unit]
            yield expert_recipe(group.product, each, [chosen[k] for k in unit])
            continue
        scheme, factor = candidate.scheme, candidate.transform.factor
        scale, zero_point = ranges[key] or (None, None)
        if scheme is None or scheme.x is None or scheme.x.symmetric:
            zero_point = None
        none = [None] * len(group.readers)
        codes, divergences = candidate.roundings or none, candidate.divergences if scheme else none
        for i, reader in enumerate(group.readers):
            error, divergence = candidate.errors[i], (divergences or none)[i]
            n, k = reader.w_nk.shape
            yield SiteRecipe(
                *reader.key,
                n=n,
                k=k,
                scheme=scheme,
                factor=None if factor is None else tuple(factor.tolist()),
                scale=scale,
                zero_point=zero_point,
                sqnr_db=round(-10 * math.log10(error), 2) if error > 0 else None,  # also of NaN
                reason=candidate.reason,
                outliers=candidate.transform.outliers,
                rounding=codes[i],
                divergence=None if divergence is None else float(f"{divergence:.3g}"),
            )
