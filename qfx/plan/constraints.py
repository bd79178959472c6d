"""Constraints: reasons why a site cannot have a certain scheme, a guard or the codes of a
recipe."""

from __future__ import annotations

from qfx.match.site import Site
from qfx.ops.forms import form_of, why_no_gradient, why_not_guarded
from qfx.plan.plan import Entry
from qfx.values.scheme import Scheme


def impossible(site: Site, scheme: Scheme) -> str | None:
    """Returns why this site cannot have this scheme, or None."""
    form = form_of(scheme)
    if site.trains and (why_not := why_no_gradient(scheme, site.weight_trains)):
        return why_not
    if lacking := form.lacking(scheme, site.device):
        return f"{scheme}: {lacking}"
    if (scheme.group or scheme.w.grouped) and not site.k:
        return f"{scheme}: K is 0 or not known, so the weight cannot be cut into groups"
    return None


def unguardable(entry: Entry, scheme: Scheme) -> str | None:
    """Returns why a matmul of this scheme cannot be guarded, or None."""
    if not entry.match.weights:
        return "both operands are activations"
    if entry.recipe is not None and entry.recipe.outliers:
        return "some of its features are float"
    if entry.match.trains:
        return "gradients are recorded"
    return why_not_guarded(scheme)


def why_nearest(site: Site) -> str | None:
    """Returns why the codes of a recipe are not used, or None."""
    why = "it trains" if site.weight_trains else site.repacked
    return f"rounded to nearest, as its weight is packed at every call: {why}" if why else None
