"""lstm_float and gru_float: the steps of recurrent layers in float, for graphs whose layers were
opened into a linear of the input and the steps. See docs/numerics.md (L1) (L2)."""

from __future__ import annotations

import torch
from torch import Tensor

from qfx.ops.recurrent import GRU_GATES, LSTM_GATES
from qfx.ops.registry import fake, in_python, no_gradient


@in_python(
    "(Tensor x, Tensor weight, Tensor? bias, Tensor h, Tensor c, bool reverse) -> "
    "(Tensor, Tensor, Tensor)"
)
def lstm_float(
    x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor, c: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the steps of an LSTM layer in the dtype of x, [T, B, 4 H], the products of its inputs:
    -> y [T, B, H], h and c [B, H]. `weight` [4 H, H], `bias` [4 H]. (L1)"""
    y, h, c = x.new_empty(*x.shape[:2], h.shape[1]), h.clone(), c.clone()
    for t in _steps(x, reverse):
        i, f, g, o = _sums(x[t], h, weight, bias).chunk(LSTM_GATES, 1)
        c = f.sigmoid_() * c + i.sigmoid_() * g.tanh_()
        y[t] = h = o.sigmoid_() * c.tanh()
    return y, h, c


@in_python("(Tensor x, Tensor weight, Tensor? bias, Tensor h, bool reverse) -> (Tensor, Tensor)")
def gru_float(
    x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Runs the steps of a GRU layer in the dtype of x, [T, B, 3 H]: -> y [T, B, H] and h [B, H].
    The arguments are those of `lstm_float`. (L2)"""
    y, h, size = x.new_empty(*x.shape[:2], h.shape[1]), h.clone(), 2 * h.shape[1]
    for t in _steps(x, reverse):
        of_state = torch.nn.functional.linear(h, weight, bias)
        r, z = (x[t][:, :size] + of_state[:, :size]).sigmoid_().chunk(GRU_GATES - 1, 1)
        n = (x[t][:, size:] + r * of_state[:, size:]).tanh_()
        y[t] = h = n + z * (h - n)
    return y, h


def _steps(x: Tensor, reverse: bool) -> range:
    return range(len(x) - 1, -1, -1) if reverse else range(len(x))


def _sums(x: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    sums = torch.addmm(x, h, weight.t())
    return sums if bias is None else sums.add_(bias)


@fake("lstm_float")
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor, c: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y = x.new_empty((*x.shape[:2], h.shape[1]))
    return y, x.new_empty(h.shape), x.new_empty(h.shape)


@fake("gru_float")
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor, reverse: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty((*x.shape[:2], h.shape[1])), x.new_empty(h.shape)


no_gradient("lstm_float", "compute it by torch.lstm")
no_gradient("gru_float", "compute it by torch.gru")
