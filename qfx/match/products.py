"""Matmuls of two activations, for example of queries and keys in attention.

product: out = y_view(a_view(a) [*B, M, K] @ b_view(b) [*B, N, K].T)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from qfx.graph.capture import value
from qfx.graph.views import Step, View, apply
from qfx.host.tensors import statically
from qfx.match.base import Match, Size
from qfx.match.refusals import of_activations

_SWAP: Step = ("transpose", (-1, -2))


@dataclass(frozen=True, kw_only=True)
class Product(Match):
    """One matmul of two activations, with the sizes of its batch, M, K and N."""

    a: fx.Node
    b: fx.Node
    a_view: View
    b_view: View
    y_view: View
    batch: Size
    m: Size
    k: Size
    n: Size
    dtype: torch.dtype
    alpha: float = 1.0  # baddbmm: alpha * product + beta * added
    beta: float = 1.0
    added: fx.Node | None = None

    @property
    def left(self) -> tuple[fx.Node, View]:
        return self.a, self.a_view

    @property
    def float_type(self) -> torch.dtype:
        return self.dtype


def product(
    node: fx.Node,
    a: Any,
    b: Any,
    path: str,
    views: tuple[View, View, View] = ((), (_SWAP,), ()),
    added: fx.Node | None = None,
) -> Product | str:
    """Returns the match of a @ b (+ added), or the reason why int8 does not support it. `views`:
    the views of a [*B, M, K], of b [*B, N, K] and of the result."""
    values: list[Any] = [value(n) if isinstance(n, fx.Node) else None for n in (a, b, node)]
    x, w, y = values
    what = "a matmul of two activations"
    if why := of_activations(what, {"left operand": x, "right operand": w}, y):
        return why
    if y.requires_grad:
        return f"{what}: its gradient is recorded, and is not int8 yet"
    if min(x.ndim, w.ndim) < 2:
        return f"{what}, one of them a vector"
    left, right = apply(views[0], x).shape, apply(views[1], w).shape
    pairs = zip(left[:-2], right[:-2], strict=False)
    if len(left) != len(right) or not all(statically(p == q) for p, q in pairs):
        return f"{what} with different batches"
    a_view, b_view, y_view = views
    return Product(
        node=node, path=path, a=a, b=b, a_view=a_view, b_view=b_view, y_view=y_view,
        batch=math.prod(left[:-2]), m=left[-2], k=left[-1], n=right[-2], dtype=x.dtype, added=added,
    )  # fmt: skip


def einsum_product(node: fx.Node, equation: str, a: Any, b: Any) -> Product | str:
    """Parses an einsum of two activations that is a batched matmul: one axis each of rows, columns
    and sums."""
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    sides = inputs.split(",")
    if not arrow or len(sides) != 2 or "." in equation:
        return f"einsum {equation!r} of two activations"
    batch = [c for c in out if c in sides[0] and c in sides[1]]
    summed = [c for c in sides[0] if c in sides[1] and c not in out]
    rows, columns = ([c for c in out if c in side and c not in batch] for side in sides)
    plain = all(len(set(axes)) == len(axes) for axes in (*sides, out))
    complete = {*sides[0]} == {*batch, *rows, *summed} and {*sides[1]} == {
        *batch,
        *columns,
        *summed,
    }
    if not plain or not complete or (len(rows), len(columns), len(summed)) != (1, 1, 1):
        return f"einsum {equation!r} of two activations is no batched matmul"
    back = permuted("".join([*batch, *rows, *columns]), list(out))
    views = (
        permuted(sides[0], [*batch, *rows, *summed]),
        permuted(sides[1], [*batch, *columns, *summed]),
        (*back, ("contiguous", ())) if back else back,
    )
    sizes = [_size(side, operand, summed[0]) for side, operand in zip(sides, (a, b), strict=True)]
    if None not in sizes and not statically(sizes[0] == sizes[1]):
        return f"einsum {equation!r} of two activations may broadcast the axis that it sums"
    return product(node, a, b, "", views)


def _size(axes: str, operand: Any, axis: str) -> Size | None:
    known = value(operand) if isinstance(operand, fx.Node) else None
    return known.shape[axes.index(axis)] if isinstance(known, Tensor) else None


def added_product(node: fx.Node, arguments: dict[str, Any]) -> Product | str:
    """Parses baddbmm(added, a, b, beta, alpha)."""
    found = product(node, arguments["x"], arguments["w"], "")
    alpha, beta = arguments.get("alpha", 1), arguments.get("beta", 1)
    if isinstance(found, str):
        return found
    if not all(isinstance(factor, int | float) for factor in (alpha, beta)):
        return "a baddbmm whose factors are not numbers"
    added = arguments["bias"] if beta else None
    return replace(found, alpha=float(alpha), beta=float(beta), added=added)


def permuted(axes: str, wanted: list[str]) -> View:
    order = tuple(axes.index(c) for c in wanted)
    return () if order == tuple(range(len(order))) else (("permute", (order,)),)
