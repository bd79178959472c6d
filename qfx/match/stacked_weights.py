"""Matmuls of a batch of matrices with a stack of weights, one weight for each.

    x [E, M, K] @ W [E, K, N]          each weight once
    x [S, M, K] @ W[ids] [S, K, N]     the weights that are chosen by number

They are parsed as products of experts, whose rows belong to the experts in equal parts, or to the
one of each number. Axes are letters, as in einsum.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from qfx.graph.capture import device, value
from qfx.graph.views import Step, View, constant_behind
from qfx.host.tensors import statically
from qfx.match.contractions import Operands, is_weight, labels
from qfx.match.experts import ExpertRows
from qfx.match.products import permuted
from qfx.ops.forms import EXPERTS

_SWAPS = (".transpose", torch.transpose, ".swapaxes", ".swapdims", ".mT")
_LETTERS = "abcdfghij"


class Stack(NamedTuple):
    """Matrices in a graph that are weights of a stack. `weight`: the stack [E, ., .]. `numbers`: of
    the weight of each matrix, None if they are all in order. `swapped`: whether the matrices are
    transposed after they are chosen."""

    weight: fx.Node
    numbers: fx.Node | None = None
    swapped: bool = False


def stack_of(node: Any) -> Stack | None:
    """Returns what stack of weights a node is, or None if it is none."""
    if not isinstance(node, fx.Node) or getattr(value(node), "ndim", 0) != 3:
        return None
    if is_weight(node):
        return Stack(node)
    swapped = _is_swap(node)
    chosen = node.args[0] if swapped else node
    if not isinstance(chosen, fx.Node) or chosen.target is not operator.getitem:
        return None
    weight, numbers = chosen.args
    integers = isinstance(numbers, fx.Node) and getattr(value(numbers), "dtype", None)
    if not is_weight(weight) or integers not in (torch.int64, torch.int32):
        return None
    flat = value(numbers).ndim == 1 and value(weight).ndim == 3  # type: ignore[arg-type]
    return Stack(weight, numbers, swapped) if flat else None  # type: ignore[arg-type]


def _is_swap(node: fx.Node) -> bool:
    name = f".{node.target}" if node.op == "call_method" else node.target
    if node.target is getattr:
        return node.args[1] == "mT"
    if name not in _SWAPS or node.kwargs:
        return False
    return sorted(d % 3 for d in node.args[1:]) == [1, 2]  # type: ignore[operator]


def multiplied(node: fx.Node, x: Any, w: Any) -> Operands | None:
    """Parses x @ w, of which one is a stack of weights. Returns None if it is no product of
    experts."""
    right, left = stack_of(w), stack_of(x)
    other = x if right else w
    rank = getattr(value(other), "ndim", 0) if isinstance(other, fx.Node) else 0
    if (right is None) == (left is None) or rank < 3:
        return None
    more = _LETTERS[: rank - 3]
    if right is not None:
        return contracted(node, right, other, f"{more}emk", "ekn", f"{more}emn")
    assert left is not None
    return contracted(node, left, other, f"{more}ekm", "enk", f"{more}enm")


def stacked_einsum(node: fx.Node, equation: Any, operands: tuple[Any, ...]) -> Operands | None:
    """Parses an einsum of two operands, of which one is a stack of weights. Returns None if it is
    no product of experts."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    stacks = [stack_of(operand) for operand in operands]
    if len(operands) != 2 or not isinstance(equation, str) or all(stacks) or not any(stacks):
        return None
    at = 0 if stacks[0] else 1
    parsed, stack = labels(equation, operands), stacks[at]
    if isinstance(parsed, str) or stack is None:
        return None
    sides, out = parsed
    return contracted(node, stack, operands[1 - at], sides[1 - at], sides[at], out)


def contracted(
    node: fx.Node, stack: Stack, x: Any, x_axes: str, w_axes: str, out: str
) -> Operands | None:
    """Parses a sum over one axis of `x` and of weights, with the axes of both and of the result.
    Returns None if it is no product of experts, or one that has no int8 form here."""
    stacked = [a for a in w_axes if a in x_axes and a in out]
    summed = [a for a in w_axes if a in x_axes and a not in out]
    columns = [a for a in w_axes if a in out and a not in x_axes]
    rows = [a for a in x_axes if a in out and a not in w_axes]
    alone = all(len(set(axes)) == len(axes) for axes in (x_axes, w_axes, out))
    whole = {*x_axes} == {*stacked, *summed, *rows} and len(w_axes) == 3
    if not alone or not whole or [len(stacked), len(summed), len(columns)] != [1, 1, 1]:
        return None
    if w_axes[0] != stacked[0] or not _fit(x, x_axes, stack, w_axes, (stacked[0], summed[0])):
        return None
    if EXPERTS.lacking(device(x)):
        return None
    sizes = [value(x).shape[x_axes.index(a)] for a in rows]
    if stack.numbers is not None and len(rows) > 0 and not all(statically(n == 1) for n in sizes):
        return None
    back = _back(rows, sizes, out, [stacked[0], *rows, columns[0]])
    if back is None:
        return None
    x_view = _flat(permuted(x_axes, [stacked[0], *rows, summed[0]]), len(rows))
    last = (w_axes.index(summed[0]) == 1) != stack.swapped
    w_view: View = (("transpose", (-1, -2)),) if last else ()
    kind = ExpertRows(numbers=stack.numbers)
    return Operands(x, stack.weight, w_view, None, x_view, back, kind)


def _fit(x: Any, x_axes: str, stack: Stack, w_axes: str, shared: tuple[str, str]) -> bool:
    """Whether the axes that both have are equally long, so that none is broadcast."""
    seen, weight = value(x), constant_behind(stack.weight)
    if not isinstance(seen, Tensor) or seen.ndim != len(x_axes) or isinstance(weight, str):
        return False
    shape = [*value(stack.weight).shape]
    if stack.swapped:
        shape = [shape[0], shape[2], shape[1]]
    if stack.numbers is not None:
        shape[0] = value(stack.numbers).shape[0]
    pairs = [(seen.shape[x_axes.index(a)], shape[w_axes.index(a)]) for a in shared]
    return all(statically(a == b) for a, b in pairs)


def _flat(view: View, rows: int) -> View:
    """Returns the view with one axis of rows after the first."""
    if rows == 1:
        return view
    step: Step = ("flatten", (1, -2)) if rows else ("unsqueeze", (1,))
    return (*view, step)


def _back(rows: list[str], sizes: list[Any], out: str, made: list[str]) -> View | None:
    """Returns the view from [stack, M, N] to the result; None if it would depend on several sizes
    that are not known."""
    view: View = ()
    if len(rows) != 1:
        known = tuple(size if type(size) is int else -1 for size in sizes)
        if known.count(-1) > 1:
            return None
        view = (("unflatten", (1, known)),) if rows else (("squeeze", (1,)),)
    moved = permuted("".join(made), list(out))
    return (*view, *moved, ("contiguous", ())) if moved else view
