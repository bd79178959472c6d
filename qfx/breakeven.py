"""Break-even: for which sizes a site gains from int8, as a condition on its symbolic M."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import StrictMinMaxConstraint

_SAMPLES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048)
Gains = Callable[[int], bool]


def hint(size: Any) -> int | None:
    """The size a symbolic dimension had in the captured call; adds no guard. None where that is not
    known: sizes that depend on data, and the uneven ones of nested tensors."""
    if not isinstance(size, torch.SymInt):
        return size
    seen = size.node.hint
    return seen if isinstance(seen, int) else None


def condition(m: torch.SymInt, gains: Gains) -> sympy.Basic:
    """Where `gains(m)` holds within the range of m: true, false, or relations in its symbols.

    The predicate is sampled at powers of two and between, and each change is located by bisection.
    """
    expression, (low, high) = m.node.expr, _ends(m)
    low = max(low or 1, 1)
    high = max(low, _SAMPLES[-1] if high is None else min(high, _SAMPLES[-1]))
    points = sorted({low, *(s for s in _SAMPLES if low < s < high), high, max(low, hint(m) or 0)})
    held = [gains(p) for p in points]
    if all(held):
        return sympy.true
    edges = [
        _first_change(points[i], points[i + 1], gains)
        for i in range(len(points) - 1)
        if held[i] != held[i + 1]
    ]
    starts, parts = [low, *edges], []
    for i, start in enumerate(starts):
        if held[0] == (i % 2 == 0):
            after = sympy.Ge(expression, start) if start > low else sympy.true
            before = sympy.Lt(expression, edges[i]) if i < len(edges) else sympy.true
            parts.append(sympy.And(after, before))
    return sympy.Or(*parts)


def _ends(size: torch.SymInt) -> tuple[int | None, int | None]:
    """The least and the greatest value of a size, None where the range has no such end: sympy has
    several infinities there. Also sizes that are never below 0, as 100 // n, may have no lower end.
    """
    node: Any = size.node
    bounds = node.shape_env.bound_sympy(node.expr)
    low, high = (
        int(end) if isinstance(end, sympy.Integer) else None for end in (bounds.lower, bounds.upper)
    )
    return low, high


def _first_change(below: int, above: int, gains: Gains) -> int:
    """The first m of (below, above] that differs from `below`."""
    at = gains(below)
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if gains(middle) == at else (below, middle)
    return above


# --- guards ---


def guard(m: torch.SymInt, where: sympy.Basic) -> bool:
    """Whether the condition holds for the captured sizes; other sizes will be captured anew."""
    if where in (sympy.true, sympy.false):
        return bool(where)
    return bool(m.node.shape_env.evaluate_expr(where))


def why_unguarded(m: torch.SymInt, where: sympy.Basic) -> str | None:
    """Why no guard can ask for the condition, or None. A size that depends on data is known too
    late, and what the user said with `mark_dynamic` is an error if a guard denies it."""
    if hint(m) is None:
        return "it depends on data"
    for size, constraint in _marked(m):
        if isinstance(constraint, StrictMinMaxConstraint):
            vr = constraint.vr
            return f"mark_dynamic asks for one graph from {vr.lower} to {vr.upper}"
        if _leaves_one(size, where):
            return f"mark_dynamic forbids a graph for {hint(size)} alone"
    return None


def _marked(m: torch.SymInt) -> Iterator[tuple[torch.SymInt, Any]]:
    """The sizes of inputs that m is made of and that the user marked, and how."""
    for tracked in m.node.shape_env.tracked_fakes or ():
        constraints = getattr(tracked.symbolic_context, "constraint_sizes", None) or ()
        for size, constraint in zip(getattr(tracked.fake, "shape", ()), constraints, strict=False):
            symbolic = isinstance(size, torch.SymInt) and constraint is not None
            if symbolic and size.node.expr.free_symbols & m.node.expr.free_symbols:
                yield size, constraint


def _leaves_one(size: torch.SymInt, where: sympy.Basic) -> bool:
    """Whether the guard would leave the size no value but the captured one."""
    seen, (low, high) = hint(size), _ends(size)
    if seen is None or where.free_symbols != {size.node.expr}:
        return False
    beside = [seen - 1] * (low is None or low < seen) + [seen + 1] * (high is None or seen < high)
    here = where.subs(size.node.expr, seen)
    return all(where.subs(size.node.expr, other) != here for other in beside)
