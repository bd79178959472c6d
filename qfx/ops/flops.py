"""Formulas for PyTorch's FlopCounterMode: each multiply-add counts as two operations, in int8 as in
float."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

import qfx.ops.recurrent_backward
import qfx.ops.recurrent_float  # noqa: F401  (they define operators)

ops = torch.ops.qfx
_BY_WEIGHT = (
    ops.linear,
    ops.linear_dynamic,
    ops.linear_experts,
    ops.linear_experts_ste,
    ops.linear_float,
    ops.linear_guarded,
    ops.linear_requantize,
    ops.linear_ste,
    ops.int8_mm,
    ops.binary_mm,
    ops.binary_linear,
)
_ATTENTIONS = (ops.int8_attention, ops.attention_decode)


@register_flop_formula(_BY_WEIGHT, get_raw=True)
def _linear(x: Tensor, *_: Any, out_val: Any = None, **__: Any) -> int:
    y = out_val if isinstance(out_val, Tensor) else out_val[0]
    return 2 * y.numel() * x.shape[-1]


@register_flop_formula(ops.int8_attention_backward, get_raw=True)
def _attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    """Counts three products of scores with D features, and two with E."""
    return 2 * math.prod(q.shape[:-1]) * k.shape[-2] * (3 * q.shape[-1] + 2 * v.shape[-1])


@register_flop_formula(ops.linears, get_raw=True)
def _linears(x: Tensor, *_: Any, out_val: Sequence[Tensor] = (), **__: Any) -> int:
    return sum(2 * y.numel() * x.shape[-1] for y in out_val)


@register_flop_formula(ops.conv_dynamic, get_raw=True)
def _conv(x: Tensor, weight: Tensor, *given: Any, out_val: Any = None, **__: Any) -> int:
    """Counts what the windows of a group are multiplied by, zeros of the padding included."""
    groups = weight.shape[0] if weight.dim() == 2 else 1
    kernel = given[_place(ops.conv_dynamic, "kernel") - 2]
    return 2 * int(out_val.numel()) * math.prod(kernel) * (x.shape[1] // groups)


@register_flop_formula(ops.conv_depthwise, get_raw=True)
def _depthwise(x: Tensor, weight: Tensor, *given: Any, out_val: Any = None, **__: Any) -> int:
    kernel = given[_place(ops.conv_depthwise, "kernel") - 2]
    return 2 * int(out_val.numel()) * math.prod(kernel)


@register_flop_formula(ops.experts, get_raw=True)
def _experts(x: Tensor, expert: Tensor, *given: Any, **__: Any) -> int:
    """Counts both products of each slot of each token, experts that do not exist included."""
    up, down = (given[_place(ops.experts, name) - 2][0] for name in ("up_layout", "down_layout"))
    gate = given[_place(ops.experts, "gate") - 2]
    hidden = up if gate == "none" else up // 2
    return 2 * expert.numel() * (up * x.shape[-1] + down * hidden)


@register_flop_formula(ops.linear_experts_backward, get_raw=True)
def _linear_experts_backward(grad: Tensor, *given: Any, **__: Any) -> int:
    """Counts the products that give the gradients of x and of the weights, if they are wanted."""
    k, wants = (given[_place(ops.linear_experts_backward, name) - 1] for name in ("k", "wants"))
    return 2 * grad.numel() * k * (wants[0] + wants[1])


@register_flop_formula(ops.experts_backward, get_raw=True)
def _experts_backward(grad: Tensor, codes: Any, *given: Any, **__: Any) -> int:
    """Counts for each slot the first product, computed again, and, if they are wanted, the second
    one for the routing weights and the products back: one for the biases, two for x."""
    names = ("expert", "up_layout", "gate", "wants")
    expert, up, gate, wants = (given[_place(ops.experts_backward, n) - 2] for n in names)
    hidden = up[0] if gate == "none" else up[0] // 2
    first, last = up[0] * codes[0].shape[-1], grad.shape[-1] * hidden
    want_x, want_routing, want_up, _ = wants
    products = (1 + want_x) * first + (want_routing + (want_x or want_up)) * last
    return 2 * expert.numel() * products


@register_flop_formula((ops.lstm_float, ops.gru_float), get_raw=True)
def _recurrent_float(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> int:
    return 2 * x.numel() * int(weight.shape[1])


@register_flop_formula((ops.lstm, ops.gru), get_raw=True)
def _recurrent(x: Tensor, *given: Any, **__: Any) -> int:
    return 2 * x.numel() * int(given[_place(ops.gru, "h") - 1].shape[-1])


@register_flop_formula((ops.lstm_backward, ops.gru_backward), get_raw=True)
def _recurrent_backward(*given: Any, **__: Any) -> int:
    """Counts the recurrent products, computed again, and those that give the gradient of h."""
    x, h = (given[_place(ops.gru_backward, name)] for name in ("x", "h"))
    if len(given) > len(ops.gru_backward.default._schema.arguments):  # of lstm_backward
        x, h = (given[_place(ops.lstm_backward, name)] for name in ("x", "h"))
    return 4 * x.numel() * int(h.shape[-1])


@register_flop_formula((ops.int8_bmm, ops.int8_bmm_dynamic), get_raw=True)
def _bmm(a: Tensor, *_: Any, out_val: Any = None, **__: Any) -> int:
    return 2 * int(out_val.numel()) * a.shape[-1]


@register_flop_formula(_ATTENTIONS, get_raw=True)
def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    return _products(q, k.shape[-2], v.shape[-1])


@register_flop_formula(ops.attention_append, get_raw=True)
def _append(
    q: Tensor, past_k: Tensor, k: Tensor, past_v: Tensor, v: Tensor, *_: Any, **__: Any
) -> int:
    return _products(q, past_k.shape[-2] + k.shape[-2], v.shape[-1])


@register_flop_formula(ops.kv_attention, get_raw=True)
def _kv_attention(q: Tensor, *given: Any, **__: Any) -> int:
    """Counts attention over the first `length` tokens of the cache."""
    return _products(q, given[_LENGTH], q.shape[-1])


@register_flop_formula(ops.kv_attention_pages, get_raw=True)
def _kv_attention_pages(q: Tensor, *given: Any, **__: Any) -> int:
    """Counts each query with all tokens for which a text has pages: how many there are is not in
    the shapes."""
    key_scale, pages = (
        given[_place(ops.kv_attention_pages, n) - 1] for n in ("key_scale", "pages")
    )
    return _products(q, pages.shape[1] * key_scale.shape[2], q.shape[-1])


def _place(operator: Any, name: str) -> int:
    return [argument.name for argument in operator.default._schema.arguments].index(name)


def _products(q: Tensor, tokens: int, width: int) -> int:
    """Counts the operations of the two matmuls of attention: queries times keys, and probabilities
    times values of `width` features. Masked tokens count too."""
    return 2 * math.prod(q.shape[:-1]) * tokens * (q.shape[-1] + width)


_LENGTH = _place(ops.kv_attention, "length") - 1
