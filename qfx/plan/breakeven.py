"""Break-even: the sizes for which a matmul gains from int8, as a condition on its symbolic M."""

from __future__ import annotations

from collections.abc import Callable

import sympy
import torch

from qfx.host.shapes import ends, expression, hint, holds_now, marked

_SAMPLES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048)
Gains = Callable[[int], bool]


def condition(m: torch.SymInt, gains: Gains) -> sympy.Basic:
    """Returns the condition under which `gains(m)` holds within the range of m: true, false, or
    relations in the symbols of m.

    `gains` is sampled at powers of two and between them, and each change is located by
    bisection.
    """
    size, (low, high) = expression(m), ends(m)
    low = max(low or 1, 1)
    high = max(low, _SAMPLES[-1] if high is None else min(high, _SAMPLES[-1]))
    points = sorted({low, *(s for s in _SAMPLES if low < s < high), high, max(low, hint(m) or 0)})
    outcomes = [gains(p) for p in points]
    if all(outcomes):
        return sympy.true
    edges = [
        _first_change(points[i], points[i + 1], gains)
        for i in range(len(points) - 1)
        if outcomes[i] != outcomes[i + 1]
    ]
    starts, parts = [low, *edges], []
    for i, start in enumerate(starts):
        if outcomes[0] == (i % 2 == 0):
            after = sympy.Ge(size, start) if start > low else sympy.true
            before = sympy.Lt(size, edges[i]) if i < len(edges) else sympy.true
            parts.append(sympy.And(after, before))
    return sympy.Or(*parts)


def _first_change(below: int, above: int, gains: Gains) -> int:
    """Returns the first m of (below, above] at which `gains` differs from its value at `below`."""
    at = gains(below)
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if gains(middle) == at else (below, middle)
    return above


# --- guards ---


def holds_for_captured(m: torch.SymInt, where: sympy.Basic) -> bool:
    """Whether the condition `where` holds for the sizes with which the graph is captured. This adds
    a guard: the graph will be captured again for sizes for which the condition has the other
    value."""
    if where in (sympy.true, sympy.false):
        return bool(where)
    return holds_now(m, where)


def why_untied(m: torch.SymInt, where: sympy.Basic) -> str | None:
    """Returns why no guard of Dynamo can test the condition `where`, or None if one can. A size
    that depends on data is known too late, and a guard that contradicts the user's `mark_dynamic`
    is an error."""
    if hint(m) is None:
        return "it depends on data"
    for size, marked_range in marked(m):
        if marked_range is not None:
            low, high = marked_range
            return f"mark_dynamic asks for one graph from {low} to {high}"
        if _leaves_one(size, where):
            return f"mark_dynamic forbids a graph for {hint(size)} alone"
    return None


def _leaves_one(size: torch.SymInt, where: sympy.Basic) -> bool:
    """Whether a guard on the condition `where` would allow the size no value but the captured
    one."""
    seen, (low, high) = hint(size), ends(size)
    if seen is None or where.free_symbols != {expression(size)}:
        return False
    beside = [seen - 1] * (low is None or low < seen) + [seen + 1] * (high is None or seen < high)
    here = where.subs(expression(size), seen)
    return all(where.subs(expression(size), other) != here for other in beside)
