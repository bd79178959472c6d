"""Symbolic sizes: their values at capture, their ranges, and conditions on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import sympy
import torch


def hint(size: Any) -> int | None:
    """Returns the size that a symbolic dimension had in the captured call, without adding a guard.
    Returns None if it is unknown: for sizes that depend on data, and for the ragged sizes of nested
    tensors."""
    if not isinstance(size, torch.SymInt):
        return size
    seen = size.node.hint
    return seen if isinstance(seen, int) else None


def expression(size: torch.SymInt) -> Any:
    return size.node.expr


def ends(size: torch.SymInt) -> tuple[int | None, int | None]:
    """Returns the least and the greatest value of a size; None for an end that is infinite. Even a
    size that is never below 0, such as 100 // n, may have no lower end."""
    node: Any = size.node
    bounds = node.shape_env.bound_sympy(node.expr)
    low, high = (
        int(end) if isinstance(end, sympy.Integer) else None for end in (bounds.lower, bounds.upper)
    )
    return low, high


def holds_now(size: torch.SymInt, condition: sympy.Basic) -> bool:
    """Whether a condition holds for the captured sizes; other sizes will be captured again."""
    return bool(size.node.shape_env.evaluate_expr(condition))


def marked(size: torch.SymInt) -> Iterator[tuple[torch.SymInt, tuple[Any, Any] | None]]:
    """Yields the input sizes from which `size` is computed and that the user marked as dynamic.
    With each comes the range that one graph has to support, None if the user gave none."""
    from torch.fx.experimental.symbolic_shapes import StrictMinMaxConstraint

    symbols = size.node.expr.free_symbols
    for tracked in size.node.shape_env.tracked_fakes or ():
        constraints = getattr(tracked.symbolic_context, "constraint_sizes", None) or ()
        for each, constraint in zip(getattr(tracked.fake, "shape", ()), constraints, strict=False):
            symbolic = isinstance(each, torch.SymInt) and constraint is not None
            if symbolic and each.node.expr.free_symbols & symbols:
                strict = isinstance(constraint, StrictMinMaxConstraint)
                yield each, (constraint.vr.lower, constraint.vr.upper) if strict else None


def compute(formula: Any, symbols: Mapping[Any, Any]) -> Any:
    """Evaluates a symbolic formula. `symbols`: symbol -> its value, which may be a proxy of a graph
    node."""
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    return sympy_interp(PythonReferenceAnalysis, {**symbols}, formula)
