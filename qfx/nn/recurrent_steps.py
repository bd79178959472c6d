"""One layer of an LSTM or a GRU in one direction: a linear of the input and one of the state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qfx.host.autograd import below_autograd, in_forward_mode, transforming
from qfx.host.modules import has_forward_hooks
from qfx.nn.linear import Linear
from qfx.nn.quantized_weight import QuantizedWeight
from qfx.ops import forms
from qfx.ops.recurrent import GRU_GATES, LSTM_GATES, steps_of

State = tuple[Tensor, ...]  # h and c [B, H] of an LSTM, h of a GRU
ops = torch.ops.qfx


def run_layer(
    of_input: Any,
    of_state: Any,
    x: Tensor,
    state: State,
    reverse: bool = False,
    sizes: Tensor | None = None,
) -> tuple[Tensor, State]:
    """Returns y [T, B, H] and the last state for x [T, B, K], or, with the batch `sizes` of a
    packed sequence, y [R, H] for x [R, K]. `of_input`, `of_state`: the linears."""
    weight = _int8_weight(of_state, x)
    if weight is None:
        return _in_float(of_input, of_state, x, state, reverse, sizes)
    products = of_input(x)
    h, *c = (t.to(products.dtype) for t in state)
    given = weight.how.given
    how = (weight.frozen.packed, given["layout"], of_state.bias, h, *c, given["code"], reverse)
    run = ops.lstm.default if c else ops.gru.default
    arguments = (products, *how, products.dtype, sizes)
    if _needs_autograd(products, of_state.bias, h, *c):
        y, *last = run(*arguments)
    else:
        with below_autograd():
            y, *last = run(*arguments)
    return y, tuple(last)


def _needs_autograd(*tensors: Tensor | None) -> bool:
    if torch.compiler.is_compiling() or in_forward_mode():
        return True
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _int8_weight(of_state: Any, x: Tensor) -> QuantizedWeight | None:
    """Returns the weight if the operator runs with it, None if its steps run one by one."""
    weight = of_state._parameters.get("weight")
    if not isinstance(of_state, Linear) or type(weight) is not QuantizedWeight or transforming():
        return None
    if "forward" in vars(of_state) or has_forward_hooks(of_state):
        return None  # which a step calls
    here = forms.LSTM.on_cuda or not x.is_cuda
    fits = weight.frozen.factor is None and weight.frozen.shift is None
    return weight if here and fits and "code" in weight.how.given else None


def _in_float(
    of_input: Any,
    of_state: Any,
    x: Tensor,
    state: State,
    reverse: bool,
    sizes: Tensor | None,
) -> tuple[Tensor, State]:
    """Runs a layer whose recurrent product has no operator: by PyTorch's if both linears are plain
    ones, otherwise step by step."""
    plain = type(of_input) is type(of_state) is nn.Linear
    if not plain or (reverse and sizes is not None):
        return _step_by_step(of_input, of_state, x, state, reverse, sizes)
    weights = [of_input.weight, of_state.weight, of_input.bias, of_state.bias]
    has_bias = of_state.bias is not None
    weights = weights if has_bias else weights[:2]
    states = [t[None] for t in state]
    run: Any = torch.lstm if len(state) > 1 else torch.gru
    given = states if len(state) > 1 else states[0]
    how = (given, weights, has_bias, 1, 0.0, False, False)
    if sizes is not None:
        y, *last = run(x, sizes, *how)
    else:
        y, *last = run(x.flip(0) if reverse else x, *how, False)
        y = y.flip(0) if reverse else y
    return y, tuple(t[0] for t in last)


def _step_by_step(
    of_input: nn.Module,
    of_state: nn.Module,
    x: Tensor,
    state: State,
    reverse: bool,
    sizes: Tensor | None,
) -> tuple[Tensor, State]:
    products = of_input(x)
    h, *c = (t.to(products.dtype) for t in state)
    flat = products.flatten(0, -2)
    found: dict[int, Tensor] = {}
    for rows, size in steps_of(x, sizes, reverse):
        before, r = h[:size], of_state(h[:size])
        if c:
            i, f, g, o = (flat[rows] + r).chunk(LSTM_GATES, 1)
            kept = f.sigmoid() * c[0][:size] + i.sigmoid() * g.tanh()
            new, c = o.sigmoid() * kept.tanh(), [torch.cat([kept, c[0][size:]])]
        else:
            (x_r, x_z, x_n), (h_r, h_z, h_n) = (t.chunk(GRU_GATES, 1) for t in (flat[rows], r))
            n = (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
            new = n + (x_z + h_z).sigmoid() * (before - n)
        h = torch.cat([new, h[size:]])
        found[rows.start] = new
    y = torch.cat([found[at] for at in sorted(found)]) if found else flat[:, : h.shape[1]]
    return y.reshape(*x.shape[:-1], h.shape[1]), (h, *c)
