"""The gradients of lstm and gru: to the products of the input, the bias and the state. See
docs/numerics.md (L3).

The forward keeps its operands and what it returned. The backward computes the recurrent products of
all steps again, as one product, because it knows all states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qfx.ops.code import Code
from qfx.ops.recurrent import GRU_GATES, LSTM_GATES, steps_of
from qfx.ops.registry import fake, gradient, in_python, no_gradient
from qfx.ops.weight_values import weight_values

ops = torch.ops.qfx
_OPERANDS = (
    "Tensor x, Tensor weight, SymInt[] layout, Tensor? bias, Tensor h, {c}Tensor y, int[] code, "
    "bool reverse, Tensor? batch_sizes) -> "
)


@in_python(
    "(Tensor? grad_y, Tensor? grad_h, Tensor? grad_c, "
    + _OPERANDS.format(c="Tensor c, ")
    + "(Tensor, Tensor, Tensor, Tensor)"
)
def lstm_backward(
    grad_y: Tensor | None,
    grad_h: Tensor | None,
    grad_c: Tensor | None,
    x: Tensor,
    weight: Tensor,
    layout: list[int],
    bias: Tensor | None,
    h: Tensor,
    c: Tensor,
    y: Tensor,
    code: Sequence[int],
    reverse: bool,
    batch_sizes: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of `lstm` from those of its results, in float32: of x [T, B, 4 H], the
    bias [4 H], h and c [B, H]. `y`: the first result. (L3)"""
    steps = [*steps_of(x, batch_sizes, reverse)]
    sums = _rows(x).float() + _products(weight, layout, bias, _before(h, y, steps), code)
    i, f, g, o = sums.chunk(LSTM_GATES, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    states, c_before = torch.empty_like(i), torch.empty_like(i)
    state = c.float().clone()
    for rows, size in steps:
        c_before[rows] = state[:size]
        state[:size] = states[rows] = f[rows] * state[:size] + i[rows] * g[rows]
    turned, w = states.tanh(), _float_weight(weight, layout, h.shape[1], code)
    dx, dh, dc = torch.empty_like(sums), _started(grad_h, h), _started(grad_c, c)
    for rows, size in reversed(steps):
        d = dh[:size] + _of_step(grad_y, rows)
        here = dc[:size] + d * o[rows] * (1 - turned[rows] ** 2)
        parts = (
            here * g[rows] * i[rows] * (1 - i[rows]),
            here * c_before[rows] * f[rows] * (1 - f[rows]),
            here * i[rows] * (1 - g[rows] ** 2),
            d * turned[rows] * o[rows] * (1 - o[rows]),
        )
        dx[rows] = torch.cat(parts, 1)
        dh[:size], dc[:size] = dx[rows] @ w, here * f[rows]
    return dx.reshape(x.shape), dx.sum(0), dh, dc


@in_python(
    "(Tensor? grad_y, Tensor? grad_h, " + _OPERANDS.format(c="") + "(Tensor, Tensor, Tensor)"
)
def gru_backward(
    grad_y: Tensor | None,
    grad_h: Tensor | None,
    x: Tensor,
    weight: Tensor,
    layout: list[int],
    bias: Tensor | None,
    h: Tensor,
    y: Tensor,
    code: Sequence[int],
    reverse: bool,
    batch_sizes: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of `gru` from those of its results, in float32: of x [T, B, 3 H], the
    bias [3 H] and h [B, H]. `y`: the first result. (L3)"""
    steps = [*steps_of(x, batch_sizes, reverse)]
    before = _before(h, y, steps)
    r, z, x_n = _rows(x).float().chunk(GRU_GATES, 1)
    h_r, h_z, h_n = _products(weight, layout, bias, before, code).chunk(GRU_GATES, 1)
    r, z = (r + h_r).sigmoid(), (z + h_z).sigmoid()
    n, w = (x_n + r * h_n).tanh(), _float_weight(weight, layout, h.shape[1], code)
    dx, dh = r.new_empty(_rows(x).shape), _started(grad_h, h)
    products = torch.empty_like(dx)
    for rows, size in reversed(steps):
        d = dh[:size] + _of_step(grad_y, rows)
        d_n = d * (1 - z[rows]) * (1 - n[rows] ** 2)
        d_z = d * (before[rows].float() - n[rows]) * z[rows] * (1 - z[rows])
        d_r = d_n * h_n[rows] * r[rows] * (1 - r[rows])
        dx[rows] = torch.cat([d_r, d_z, d_n], 1)
        products[rows] = torch.cat([d_r, d_z, d_n * r[rows]], 1)
        dh[:size] = d * z[rows] + products[rows] @ w
    return dx.reshape(x.shape), products.sum(0), dh


def _rows(t: Tensor) -> Tensor:
    return t if t.dim() == 2 else t.flatten(0, 1)


def _before(h: Tensor, y: Tensor, steps: list[tuple[slice, int]]) -> Tensor:
    """Returns the state h before each row of each step, [R, H]."""
    state, found = h.clone(), torch.empty_like(_rows(y))
    for rows, size in steps:
        found[rows] = state[:size]
        state[:size] = _rows(y)[rows]
    return found


def _products(
    weight: Tensor, layout: list[int], bias: Tensor | None, h: Tensor, code: Sequence[int]
) -> Tensor:
    how = (weight, layout, bias, code, "none", torch.float32)
    return ops.linear_dynamic.default(h, *how)  # type: ignore[no-any-return]


def _float_weight(weight: Tensor, layout: list[int], k: int, code: Sequence[int]) -> Tensor:
    """Returns the dequantized weight that multiplies h before its rotation, [G H, H]. (R1)"""
    w = weight_values(weight, layout, k, torch.float32)
    return ops.rotate.default(w, None, Code(*code).rotation, True)  # type: ignore[no-any-return]


def _started(grad: Tensor | None, state: Tensor) -> Tensor:
    """Returns the gradient of the last state in float32, in memory of its own."""
    if grad is None:
        return torch.zeros_like(state, dtype=torch.float32)
    return grad.to(torch.float32, copy=True)


def _of_step(grad_y: Tensor | None, rows: slice) -> Tensor | float:
    return 0.0 if grad_y is None else _rows(grad_y)[rows].float()


@fake("lstm_backward")
def _(
    grad_y: Tensor | None,
    grad_h: Tensor | None,
    grad_c: Tensor | None,
    x: Tensor,
    weight: Tensor,
    layout: list[int],
    bias: Tensor | None,
    h: Tensor,
    c: Tensor,
    y: Tensor,
    code: Sequence[int],
    reverse: bool,
    batch_sizes: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_empty(x, h), h.new_empty(h.shape, dtype=torch.float32)


@fake("gru_backward")
def _(
    grad_y: Tensor | None,
    grad_h: Tensor | None,
    x: Tensor,
    weight: Tensor,
    layout: list[int],
    bias: Tensor | None,
    h: Tensor,
    y: Tensor,
    code: Sequence[int],
    reverse: bool,
    batch_sizes: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(x, h)


def _empty(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape, dtype=torch.float32),
        x.new_empty(x.shape[-1:], dtype=torch.float32),
        h.new_empty(h.shape, dtype=torch.float32),
    )


no_gradient("lstm_backward", "compute it in float")
no_gradient("gru_backward", "compute it in float")


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, ctx.layout, bias, *states, code, reverse, _, batch_sizes = inputs
    ctx.how, ctx.places = (code, reverse), (0, 3, *range(4, 4 + len(states)))
    ctx.leaves = tuple(
        None if t is None or not t.requires_grad else t.dtype for t in (x, bias, *states)
    )
    ctx.count = len(inputs)
    ctx.save_for_backward(x, weight, bias, batch_sizes, *states, output[0])
    ctx.set_materialize_grads(False)


def _formula(operator: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    def compute(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        gradients: list[Tensor | None] = [None] * ctx.count
        if all(grad is None for grad in grads):
            return tuple(gradients)
        x, weight, bias, batch_sizes, *states = ctx.saved_tensors
        found = operator(*grads, x, weight, ctx.layout, bias, *states, *ctx.how, batch_sizes)
        for place, d, dtype in zip(ctx.places, found, ctx.leaves, strict=True):
            gradients[place] = None if dtype is None else d.to(dtype)
        return tuple(gradients)

    return compute


gradient("lstm", _setup, _formula(ops.lstm_backward))
gradient("gru", _setup, _formula(ops.gru_backward))
