"""Break-even: for which sizes a site gains from int8, as a condition on its symbolic M."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch

_SAMPLES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
Gains = Callable[[int], bool]


def condition(m: torch.SymInt, gains: Gains) -> sympy.Basic:
    """Where `gains(m)` holds within the range of m: true, false, or relations in its symbols.

    The predicate is sampled at powers of two and between, and each change is located by bisection.
    """
    expression, low, high = _range(m)
    points = sorted({low, *(s for s in _SAMPLES if low < s < high), min(high, 2 * _SAMPLES[-1])})
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


def _range(m: torch.SymInt) -> tuple[sympy.Expr, int, int]:
    node: Any = m.node
    bounds = node.shape_env.bound_sympy(node.expr)
    high = 2 * _SAMPLES[-1]
    upper = int(bounds.upper) if bounds.upper.is_number and bounds.upper < high else high
    return node.expr, max(int(bounds.lower), 1), max(upper, 1)


def _first_change(below: int, above: int, gains: Gains) -> int:
    """The first m of (below, above] that differs from `below`."""
    at = gains(below)
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if gains(middle) == at else (below, middle)
    return above


def guard(m: torch.SymInt, where: sympy.Basic) -> bool:
    """Whether the condition holds for the captured sizes; other sizes will be captured anew."""
    if where in (sympy.true, sympy.false):
        return bool(where)
    return bool(m.node.shape_env.evaluate_expr(where))
