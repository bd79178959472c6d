"""Exclusions: matmuls that stay float, whatever their predicted gain, unless a recipe names them;
and reasons why a matmul with a weight cannot have a certain scheme, a guard or the codes of a
recipe."""

from __future__ import annotations

from collections.abc import Container, Iterator

from torch import fx

from qfx.match.base import Match
from qfx.match.site import Site
from qfx.ops.forms import IM2COL, form_of, why_no_gradient, why_not_guarded
from qfx.plan.plan import Entry
from qfx.values.limits import why_few_features, why_few_inputs
from qfx.values.scheme import Scheme

_PERIODIC = {"sin", "cos", "sinc", "tan"}
_LINEAR = """
    add sub rsub iadd isub mul imul multiply div truediv itruediv divide true_divide neg negative
    addcmul deg2rad rad2deg remainder mod fmod frac cat concat concatenate stack hstack vstack where
    masked_fill pad to float half bfloat16 double type type_as _to_copy clone contiguous detach
    alias getattr T mT t view view_as reshape flatten unflatten transpose swapaxes swapdims permute
    movedim numpy_T squeeze unsqueeze expand expand_as broadcast_to repeat repeat_interleave tile
    chunk split split_with_sizes unbind select narrow slice index_select index getitem __getitem__
    roll flip
"""
_MOST_EXPERTS = 1024
_ADDS = {"add", "iadd"}
_STEPS = 6  # from a sine to the sum with its argument: a power, a division, casts
_TURNS = "its output is an angle of {}, which turns an absolute error into one of phase"
_KEEPING_ORDER = {"softmax", "sigmoid", "softplus", "sqrt"}
_PASSED = frozenset(_LINEAR.split())  # pointwise linear operations, and copies


def why_excluded(match: Match) -> str | None:
    """Returns why int8 does not suit the matmul: its output is an angle, its weight has few
    features, its outputs choose experts, or it reads the few inputs of a recurrent layer. Returns
    None otherwise. A matmul of two activations is decided by its predicted gain, however few
    features it has."""
    if not isinstance(match, Site):
        return _why_angle(match) or _why_router(match)
    few = why_few_features(match.k) or why_few_inputs(match.k, match.names)
    return _why_angle(match) or few or _why_router(match)


def impossible(site: Site, scheme: Scheme) -> str | None:
    """Returns why this matmul cannot be int8 with this scheme, or None if it can."""
    form = form_of(scheme)
    if site.trains and (why_not := why_no_gradient(scheme, site.weight_trains)):
        return why_not
    if lacking := form.lacking(scheme, site.device):
        return f"{scheme}: {lacking}"
    reads_windows = any(method == "im2col" for method, _ in site.x_view)
    if reads_windows and (lacking := IM2COL.lacking(site.device)):
        return f"a convolution whose windows overlap or are padded: {lacking}"
    if (scheme.group or scheme.w.grouped) and not site.k:
        return f"{scheme}: K is 0 or not known, so the weight cannot be cut into groups"
    return None


def unguardable(entry: Entry, scheme: Scheme) -> str | None:
    """Returns why a matmul of this scheme cannot have a guard, which runs rows with a large error
    in float; None if it can."""
    if not entry.match.weights:
        return "both operands are activations"
    if not isinstance(entry.match, Site):
        return "its rows are multiplied by several weights"
    if entry.recipe is not None and entry.recipe.outliers:
        return "some of its features are float"
    if entry.match.trains:
        return "gradients are recorded"
    return why_not_guarded(scheme)


def why_nearest(site: Site) -> str | None:
    """Returns why the codes that a recipe contains for the weight are not used; None if they
    are."""
    why = "it trains" if site.weight_trains else site.repacked
    return f"rounded to nearest, as its weight is packed at every call: {why}" if why else None


def _why_router(match: Match) -> str | None:
    """Returns the reason if the greatest outputs are chosen: then an error of the matmul can choose
    others. More outputs than models have experts are words."""
    n = match.n if isinstance(match, Site) else None
    if n is None or n > _MOST_EXPERTS or not any(_name(u) == "topk" for u in _users(match.out)):
        return None
    return f"the greatest of its {n} outputs are chosen (topk): a router of experts stays float"


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """Yields what reads the node, or values computed from it by pointwise operations."""
    pending, seen = [node], {node}
    while pending:
        for user in pending.pop().users:
            if user not in seen:
                seen.add(user)
                yield user
                if _name(user) in _PASSED | _KEEPING_ORDER:
                    pending.append(user)


def _why_angle(match: Match) -> str | None:
    """Returns the reason if the output is an angle. The error of an angle does not shrink with the
    angle, so its sine has the same absolute error. In `x + sin(x)`, as vocoders have it, x is no
    angle: its own error is as large."""
    if isinstance(match, Site) and match.activation != "none":
        return None
    angles = _computed_linearly(match.out)
    for node in angles:
        for user in node.users:
            name = _name(user)
            if name == "polar" and _angle_of_polar(user) is node:
                return _TURNS.format(name)
            if name in _PERIODIC and not _is_added_to(user, angles):
                return _TURNS.format(name)
    return None


def _computed_linearly(node: fx.Node) -> dict[fx.Node, None]:
    """Returns the node, and the values computed from it by linear pointwise operations and
    copies."""
    found, pending = {node: None}, [node]
    while pending:
        for user in pending.pop().users:
            if _name(user) in _PASSED and user not in found:
                found[user] = None
                pending.append(user)
    return found


def _is_added_to(periodic: fx.Node, angles: Container[fx.Node]) -> bool:
    """Whether what is computed from a periodic function, in a few steps, is added to one of
    `angles`: `x + sin(a x)^2 / a`."""
    layer = {periodic}
    for _ in range(_STEPS):
        layer = {user for node in layer for user in node.users}
        adds = [node for node in layer if _name(node) in _ADDS]
        if any(other in angles for node in adds for other in node.all_input_nodes):
            return True
    return False


def _name(node: fx.Node) -> str:
    """Returns the name of the function or method that the node calls, without the suffix of
    in-place methods; "" for other nodes."""
    if node.op not in ("call_function", "call_method"):
        return ""
    named = str(getattr(node.target, "__name__", node.target)).partition(".")[0]
    return named if named.startswith("__") else named.rstrip("_")


def _angle_of_polar(node: fx.Node) -> object:
    return node.kwargs.get("angle", node.args[-1] if node.args else None)
