"""The recurrence of LSTM and GRU layers: lstm, gru. This module contains their references and fake
implementations. Their gradients are in `qfx.ops.recurrent_backward`. See docs/numerics.md (L1)
(L2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from qfx.ops.linear import linear_dynamic
from qfx.ops.registry import fake, reference
from qfx.ops.sums import fma

LSTM_GATES, GRU_GATES = 4, 3


@reference
def lstm(
    x: Tensor,
    weight: Tensor,
    layout: Sequence[int],
    bias: Tensor | None,
    h: Tensor,
    c: Tensor,
    code: Sequence[int],
    reverse: bool,
    out_dtype: torch.dtype,
    batch_sizes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the steps of an LSTM layer: x float [T, B, 4 H], the products of its inputs with their
    biases, -> y out_dtype [T, B, H] and the state after the last step, h and c [B, H]. (L1)

    `weight`: packed [4 H, H], with gates in PyTorch's order, and `bias` [4 H]. h and c [B, H]: the
    state before, h in out_dtype. `reverse`: from the last step to the first. With `batch_sizes`,
    int64 [T] that do not increase, x and y are those of a packed sequence, [R, 4 H] and [R, H].
    """
    y, h, c = _output(x, LSTM_GATES, out_dtype), h.clone(), c.float()
    for rows, size in steps_of(x, batch_sizes, reverse):
        r = linear_dynamic(h[:size], weight, layout, bias, code, "none", torch.float32)
        i, f, g, o = (_rows(x)[rows].float() + r).chunk(LSTM_GATES, 1)
        new = exact_sigmoid(f) * c[:size] + exact_sigmoid(i) * exact_tanh(g)
        h = torch.cat([(exact_sigmoid(o) * exact_tanh(new)).to(out_dtype), h[size:]])
        c = torch.cat([new, c[size:]])
        _rows(y)[rows] = h[:size]
    return y, h, c.to(out_dtype)


@reference
def gru(
    x: Tensor,
    weight: Tensor,
    layout: Sequence[int],
    bias: Tensor | None,
    h: Tensor,
    code: Sequence[int],
    reverse: bool,
    out_dtype: torch.dtype,
    batch_sizes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs the steps of a GRU layer: x float [T, B, 3 H], the products of its inputs with their
    biases, -> y out_dtype [T, B, H] and the state h [B, H] after the last step. (L2)

    The arguments are those of `lstm`; `weight` is packed [3 H, H].
    """
    y, h = _output(x, GRU_GATES, out_dtype), h.clone()
    for rows, size in steps_of(x, batch_sizes, reverse):
        r = linear_dynamic(h[:size], weight, layout, bias, code, "none", torch.float32)
        (x_r, x_z, x_n), (h_r, h_z, h_n) = (
            t.chunk(GRU_GATES, 1) for t in (_rows(x)[rows].float(), r)
        )
        n = exact_tanh(x_n + exact_sigmoid(x_r + h_r) * h_n)
        new = n + exact_sigmoid(x_z + h_z) * (h[:size].float() - n)
        h = torch.cat([new.to(out_dtype), h[size:]])
        _rows(y)[rows] = h[:size]
    return y, h


def _output(x: Tensor, gates: int, dtype: torch.dtype) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // gates), dtype=dtype)


def _rows(t: Tensor) -> Tensor:
    """Returns the rows of all steps as a view, [R, columns]."""
    return t if t.dim() == 2 else t.flatten(0, 1)


def steps_of(x: Tensor, batch_sizes: Tensor | None, reverse: bool) -> Iterator[tuple[slice, int]]:
    """Yields the steps in the order in which they run: their rows among those of all steps, and how
    many rows of the state they have, the first ones."""
    sizes = [x.shape[1]] * x.shape[0] if batch_sizes is None else batch_sizes.tolist()
    found, begin = [], 0
    for size in sizes:
        found.append((slice(begin, begin + size), size))
        begin += size
    return iter(found[::-1] if reverse else found)


def exact_sigmoid(v: Tensor) -> Tensor:
    """Returns sigmoid(v) float32 with the bits of the kernels. (L1)"""
    return 1 / (1 + _exp(-v))


def exact_tanh(v: Tensor) -> Tensor:
    """Returns tanh(v) float32 with the bits of the kernels. (L1)"""
    return 2 * exact_sigmoid(2 * v) - 1


_TERMS = (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)


def _exp(x: Tensor) -> Tensor:
    """Returns e^x as csrc/cpu/kernels/rows/activation.h computes it: n ln 2 + r = x, and a
    polynomial of r."""

    def number(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float32, device=x.device)

    bounded = x.clamp(-80, 89)
    shifted = fma(bounded, number(1.44269504088896341), number(12582912.0))
    n = shifted - 12582912.0
    r = fma(n, number(-0.693145751953125), bounded)
    r = fma(n, number(-1.42860682030941723e-6), r)
    p = number(1 / 5040)
    for term in _TERMS:
        p = fma(p, r, number(term))
    power = torch.where(n >= 128, torch.inf, torch.exp2(n.double())).float()
    return p * power


@fake("lstm")
def _(
    x: Tensor,
    weight: Tensor,
    layout: Sequence[int],
    bias: Tensor | None,
    h: Tensor,
    c: Tensor,
    code: Sequence[int],
    reverse: bool,
    out_dtype: torch.dtype,
    batch_sizes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    state = h.new_empty(h.shape, dtype=out_dtype), h.new_empty(h.shape, dtype=out_dtype)
    return h.new_empty((*x.shape[:-1], h.shape[1]), dtype=out_dtype), *state


@fake("gru")
def _(
    x: Tensor,
    weight: Tensor,
    layout: Sequence[int],
    bias: Tensor | None,
    h: Tensor,
    code: Sequence[int],
    reverse: bool,
    out_dtype: torch.dtype,
    batch_sizes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    y = h.new_empty((*x.shape[:-1], h.shape[1]), dtype=out_dtype)
    return y, h.new_empty(h.shape, dtype=out_dtype)
