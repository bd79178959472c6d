"""Definitions of recurrent layers and cells in terms of linears, by which graphs are opened: a cell
consists of two linears and its gates, a layer of a linear of its input and the steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def lstm_cell(
    input: Tensor,
    hx: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    h, c = hx
    sums = F.linear(input, w_ih, b_ih) + F.linear(h, w_hh, b_hh)
    i, f, g, o = sums.chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def gru_cell(
    input: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    x_r, x_z, x_n = F.linear(input, w_ih, b_ih).chunk(3, 1)
    h_r, h_z, h_n = F.linear(hx, w_hh, b_hh).chunk(3, 1)
    n = torch.tanh(x_n + torch.sigmoid(x_r + h_r) * h_n)
    return n + torch.sigmoid(x_z + h_z) * (hx - n)


def lstm(
    input: Tensor,
    hx: Any,
    params: Any,
    has_biases: Any = None,
    num_layers: Any = 1,
    dropout: Any = 0.0,
    train: Any = False,
    bidirectional: Any = False,
    batch_first: Any = None,
) -> Any:
    """Computes torch.lstm of a sequence. Returns NotImplemented for a packed sequence, for
    projections, and where gradients are recorded."""
    if batch_first is None or isinstance(hx, Tensor) or hx[0].shape[-1] != hx[1].shape[-1]:
        return NotImplemented
    how = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
    return _layers(input, tuple(hx), params, *how)


def gru(
    input: Tensor,
    hx: Any,
    params: Any,
    has_biases: Any = None,
    num_layers: Any = 1,
    dropout: Any = 0.0,
    train: Any = False,
    bidirectional: Any = False,
    batch_first: Any = None,
) -> Any:
    """Computes torch.gru of a sequence. Returns NotImplemented as `lstm` does."""
    if batch_first is None or isinstance(params, Tensor):
        return NotImplemented
    how = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
    return _layers(input, (hx,), params, *how)


def _layers(
    x: Tensor,
    states: tuple[Tensor, ...],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    if torch.is_grad_enabled() or x.device.type != "cpu" or x.dtype not in FLOATS:
        return NotImplemented
    if any(t.dtype != x.dtype for t in (*states, *params)):
        return NotImplemented
    size, found = 4 if has_biases else 2, list[Any]()
    x = x.transpose(0, 1) if batch_first else x
    for layer in range(num_layers):
        if layer and train and dropout:
            x = F.dropout(x, dropout)
        outputs = []
        for reverse in (False, True)[: 1 + bidirectional]:
            place = len(found)
            w_ih, w_hh, *biases = params[size * place : size * (place + 1)]
            b_ih, b_hh = biases or (None, None)
            state = [t.select(0, place) for t in states]
            products = F.linear(x, w_ih, b_ih)
            run = _STEPS[len(state)]()
            y, *last = run(products, w_hh, b_hh, *state, reverse)
            outputs.append(y)
            found.append(last)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
    x = x.transpose(0, 1) if batch_first else x
    return (x, *(torch.stack(each) for each in zip(*found, strict=True)))


_STEPS = {  # by the number of states; looked up when they are called, since they are defined later
    1: lambda: torch.ops.qfx.gru_float.default,
    2: lambda: torch.ops.qfx.lstm_float.default,
}
aten = torch.ops.aten
BODIES: dict[Any, Any] = {
    torch.lstm_cell: lstm_cell,
    aten.lstm_cell.default: lstm_cell,
    torch.gru_cell: gru_cell,
    aten.gru_cell.default: gru_cell,
    torch.lstm: lstm,
    aten.lstm.input: lstm,
    torch.gru: gru,
    aten.gru.input: gru,
}
LAYERS = (torch.lstm, torch.gru, aten.lstm.input, aten.gru.input)
