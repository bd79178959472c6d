"""Other forms of matmuls: einsum, and a weight as the left operand.

Each is parsed as y = y_view(x_view(x) @ w_view(weight).T + bias_view(bias)), or gives a reason why
it cannot be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from qfx.graph.capture import value
from qfx.graph.computed import sources_of
from qfx.graph.views import Step, T, View, constant_behind
from qfx.host.tensors import statically
from qfx.match.experts import ExpertRows
from qfx.match.products import Product, einsum_product


@dataclass(frozen=True)
class Operands:
    """The operands of y_view(x_view(x) @ w_view(right).T + bias_view(bias)). `right` is a constant
    if the matmul has a weight."""

    x: fx.Node
    right: fx.Node
    w_view: View  # of right, to [N, K]
    bias: fx.Node | None = None
    x_view: View = ()  # to [..., K]
    y_view: View = ()  # from [..., N]
    rows: ExpertRows | None = None  # of experts, whose weights are [E, N, K]
    bias_view: View = ()  # of bias, to [N]
    groups: int = 1  # of channels, each with rows of the weight
    steps: Mapping[str, Any] | None = None  # the arguments of a recurrent layer's steps


def is_weight(node: Any) -> bool:
    """Whether the operand is a constant of the model, possibly through views."""
    return isinstance(node, fx.Node) and not isinstance(constant_behind(node), str)


def is_known(node: Any) -> bool:
    """Whether the operand is a weight, or is computed from constants alone."""
    return is_weight(node) or (isinstance(node, fx.Node) and bool(sources_of(node)))


_SWAP: Step = ("transpose", (-1, -2))


def left(node: fx.Node, weight: fx.Node, x: fx.Node) -> Operands | str:
    """Parses a matmul with a weight as the left operand: W @ x = (x.T @ W.T).T"""
    if getattr(value(x), "ndim", 0) < 2:
        return "a weight times a vector"
    return Operands(x, weight, (), None, (_SWAP,), as_recorded(node, _SWAP))


def as_recorded(node: fx.Node, *steps: Step) -> View:
    """Returns the steps as a view of the result, and a copy after them if the result of `node` was
    contiguous when the graph was captured."""
    recorded = value(node)
    strided = recorded is not None and not recorded.is_contiguous()
    return steps if strided else (*steps, ("contiguous", ()))


# --- einsum ---


def einsum(node: fx.Node, equation: Any, operands: tuple[Any, ...]) -> Operands | Product | str:
    """Parses an einsum that is a single matmul, with a weight or of two activations; returns the
    reason if it is neither."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if len(operands) != 2 or not isinstance(equation, str):
        return f"einsum of {len(operands)} operands, not two"
    weights = [is_known(o) for o in operands]
    if not any(weights) or any(getattr(value(o), "ndim", 2) > 2 for o in operands if is_known(o)):
        batched = einsum_product(node, equation, *operands)
        if not any(weights) or not isinstance(batched, str):
            return batched
    if all(weights):
        return "einsum of two constants"
    at = weights.index(True)
    x, weight = operands[1 - at], operands[at]
    parsed = labels(equation, operands)
    if isinstance(parsed, str):
        return parsed
    sides, output = parsed
    return _contraction(node, x, weight, sides[1 - at], sides[at], output)


def labels(equation: str, operands: tuple[Any, ...]) -> tuple[list[str], str] | str:
    """Returns the letters of the axes of both operands, and those of the output, after replacing
    '...' by letters. Returns the reason as a str if the equation cannot be a matmul for qfx."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    sides = inputs.split(",")
    if not arrow or len(sides) != 2:
        return f"einsum {equation!r} without an explicit output"
    spare = "".join(c for c in map(chr, range(ord("\u03b1"), ord("\u03c9"))) if c not in equation)
    for i, side in enumerate(sides):
        if "..." in side:
            rank = getattr(value(operands[i]), "ndim", None)
            if rank is None or "..." in sides[1 - i]:
                return f"einsum {equation!r} with an ellipsis of unknown or shared axes"
            letters = spare[: rank - len(side) + 3]
            sides[i], output = side.replace("...", letters), output.replace("...", letters)
    return sides, output


def _contraction(
    node: fx.Node, x: fx.Node, weight: fx.Node, x_axes: str, w_axes: str, out: str
) -> Operands | str:
    repeated = any(len(set(axes)) != len(axes) for axes in (x_axes, w_axes, out))
    summed = [a for a in x_axes if a in w_axes and a not in out]
    shared = [a for a in x_axes if a in w_axes and a in out]
    rows, columns = ([a for a in out if a in axes and a not in shared] for axes in (x_axes, w_axes))
    shape = getattr(value(weight), "shape", None)
    if repeated or shared or not summed or not columns:
        return "an einsum that is no matmul with a weight"
    if set(x_axes) != {*rows, *summed} or set(w_axes) != {*columns, *summed}:
        return "an einsum that sums an axis of one operand"
    if shape is None or len(shape) != len(w_axes) or getattr(value(x), "ndim", -1) != len(x_axes):
        return "an einsum of operands whose shapes are not known"
    x_shape = value(x).shape
    both = [(x_shape[x_axes.index(a)], shape[w_axes.index(a)]) for a in summed]
    if not all(statically(p == q) for p, q in both):
        return "an einsum that may broadcast an axis that it sums"
    sizes = tuple(int(shape[w_axes.index(a)]) for a in columns)
    k = math.prod(int(shape[w_axes.index(a)]) for a in summed)
    x_view = _ordered(x_axes, [*rows, *summed], flat_from=len(rows))
    w_view: View = _ordered(w_axes, [*columns, *summed], flat_from=len(w_axes))
    if len(w_axes) > 2:
        w_view = (*w_view, ("reshape", ((math.prod(sizes), k),)))
    y_view: View = (("unflatten", (-1, sizes)),) if len(sizes) > 1 else ()
    moved = _ordered("".join([*rows, *columns]), list(out), flat_from=len(out))
    back = as_recorded(node, *y_view, *moved) if moved else y_view
    return Operands(x, weight, w_view, None, x_view, back)


def _ordered(axes: str, wanted: list[str], flat_from: int) -> View:
    """Returns a view with the axes in the wanted order; those from `flat_from` on are flattened to
    one."""
    order = tuple(axes.index(a) for a in wanted)
    view: View = () if order == tuple(range(len(order))) else (("permute", (order,)),)
    view = (T,) if order == (1, 0) else view
    return (*view, ("flatten", (flat_from, -1))) if flat_from < len(wanted) - 1 else view
