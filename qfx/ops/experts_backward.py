"""The gradient of experts, a block whose weights are frozen: to its tokens, the routing weights and
the biases. See docs/numerics.md (X4).

The forward keeps the codes of the tokens and nothing of what is between the two products: the
backward computes that again, for the tokens of one expert after the other, so that no more than one
weight is dequantized at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qfx.ops.code import Code
from qfx.ops.registry import fake, gradient, in_python, no_gradient
from qfx.ops.weight_values import weight_values

ops = torch.ops.qfx
aten = torch.ops.aten


class _Product(NamedTuple):
    """One of the two products of all experts. `code`: of its input."""

    packed: Tensor
    layout: list[int]
    bias: Tensor | None
    code: Sequence[int]

    def of(self, e: int) -> tuple[Tensor, list[int], Tensor | None]:
        """Returns the weight, layout and bias of one expert, as linears take them."""
        return self.packed[e], self.layout, None if self.bias is None else self.bias[e]

    def back(self, e: int, g: Tensor, k: int) -> Tensor:
        """Returns g [rows, N] times the dequantized weight [N, k] of an expert, in float32."""
        return (g @ weight_values(self.packed[e], self.layout, k, g.dtype)).float()

    @property
    def rotation(self) -> int:
        return Code(*self.code).rotation


@in_python(
    "(Tensor grad, Tensor[] codes, Tensor expert, Tensor routing, Tensor up, SymInt[] up_layout, "
    "Tensor? up_bias, Tensor down, SymInt[] down_layout, Tensor? down_bias, int[] code, "
    "int[] down_code, str activation, str gate, float limit, float shift, ScalarType dtype, "
    "bool[] wants) -> (Tensor, Tensor, Tensor, Tensor)"
)
def experts_backward(
    grad: Tensor,
    codes: Sequence[Tensor],
    expert: Tensor,
    routing: Tensor,
    up: Tensor,
    up_layout: list[int],
    up_bias: Tensor | None,
    down: Tensor,
    down_layout: list[int],
    down_bias: Tensor | None,
    code: Sequence[int],
    down_code: Sequence[int],
    activation: str,
    gate: str,
    limit: float,
    shift: float,
    dtype: torch.dtype,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients of a block of experts from that of its output, [T, N]: of x [T, K] in
    `dtype`, of the routing weights [T, S], and of the biases, float32 [E, G I] and [E, N]. (X4)

    `codes`: q int8, scale and zero point of x. `wants`: which of the four are computed; the others
    are empty.
    """
    want_x, want_routing, want_up, want_down = wants
    sizes = (codes[0], expert, routing, up_layout, down_layout, up.shape[0])
    found = _empty(*sizes, torch.float32, wants)
    dx, d_routing, d_up, d_down = (t.zero_() for t in found)
    first = _Product(up, up_layout, up_bias, code)
    last = _Product(down, down_layout, down_bias, down_code)
    hidden = up_layout[0] if gate == "none" else up_layout[0] // 2
    for e, tokens, slots in _slots_of(expert, up.shape[0]):
        g, r = grad[tokens], routing[tokens, slots, None].float()
        triple = (part[tokens] for part in codes)
        u = ops.linear.default(*triple, *first.of(e), "none", torch.float32)
        if want_routing:
            h = _gated(u, activation, gate, limit, shift)
            y = ops.linear_dynamic.default(h, *last.of(e), last.code, "none", torch.float32)
            d_routing[tokens, slots] = (g.float() * y).sum(1).to(routing.dtype)
        dy = (g.float() * r).to(g.dtype)
        if want_down:
            d_down[e] = dy.float().sum(0)
        if not (want_x or want_up):
            continue
        dh = ops.rotate.default(last.back(e, dy, hidden), None, last.rotation, True)
        du = gate_gradient(u, dh, activation, gate, limit, shift)
        if want_up:
            d_up[e] = du.sum(0)
        if want_x:
            dx.index_add_(0, tokens, first.back(e, du.to(g.dtype), dx.shape[1]))
    if want_x:
        dx = ops.rotate.default(dx, None, first.rotation, True)
    return dx.to(dtype), d_routing, d_up, d_down


def _slots_of(expert: Tensor, experts: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yields the experts that exist and have tokens, with the tokens and slots that go to each."""
    order = expert.reshape(-1).argsort(stable=True)
    numbers, counts = expert.reshape(-1).unique(return_counts=True)
    begin, slots = 0, max(expert.shape[1], 1)
    if len(numbers) and int(numbers[0]) < 0:
        raise ValueError(f"expert has {int(numbers[0])}, expected numbers from 0 on")
    for e, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        places = order[begin : begin + count]
        begin += count
        if e < experts:
            yield e, places // slots, places % slots


def _gated(u: Tensor, activation: str, gate: str, limit: float, shift: float) -> Tensor:
    """Returns h of the outputs of the first product, with the bits of the forward: the epilogue of
    an operator applies the activation function."""
    g, v = _parts(u, gate)
    most = limit or float("inf")
    h = _activated(g.clamp(max=most), activation)
    return h if v is None else h * (v.clamp(-most, most) + shift)


def _activated(g: Tensor, activation: str) -> Tensor:
    """Applies an activation function as kernels do, with the floats as scales of codes that are
    1."""
    ones = torch.ones((g.numel(), 1), dtype=torch.int32, device=g.device)
    scale = g.reshape(-1, 1)
    y = ops.dequantize.default(ones, scale, None, None, None, activation, torch.float32)
    return y.reshape(g.shape)  # type: ignore[no-any-return]


def _parts(u: Tensor, gate: str) -> tuple[Tensor, Tensor | None]:
    """Returns the gates and what they multiply: views of u."""
    if gate == "none":
        return u, None
    g, v = (u[:, ::2], u[:, 1::2]) if gate == "interleaved" else u.chunk(2, dim=1)
    return g, v


def gate_gradient(
    u: Tensor, dh: Tensor, activation: str, gate: str, limit: float, shift: float
) -> Tensor:
    """Returns the gradient of u from that of h = gated(u), both float32. Values beyond the limit
    have none. (X4)"""
    du = torch.empty_like(u)
    (g, v), (dg, dv), most = _parts(u, gate), _parts(du, gate), limit or float("inf")
    clipped = g.clamp(max=most)
    d_act = dh if v is None else dh * (v.clamp(-most, most) + shift)
    dg.copy_(torch.where(g <= most, _DERIVATIVES[activation](d_act, clipped), 0.0))
    if v is not None and dv is not None:
        dv.copy_(torch.where(v.abs() <= most, dh * _activated(clipped, activation), 0.0))
    return du


def _quick_gelu(d: Tensor, v: Tensor) -> Tensor:
    s = torch.sigmoid(1.702 * v)
    return d * (s + 1.702 * v * (s * (1 - s)))


# Gradients of the activation functions (E2): from that of the result and the argument.
_DERIVATIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda d, v: d,
    "relu": lambda d, v: torch.where(v <= 0, 0.0, d),
    "gelu": lambda d, v: aten.gelu_backward.default(d, v),
    "gelu_tanh": lambda d, v: aten.gelu_backward.default(d, v, approximate="tanh"),
    "silu": lambda d, v: aten.silu_backward.default(d, v),
    "quick_gelu": _quick_gelu,
    "hardswish": lambda d, v: aten.hardswish_backward.default(d, v),
    "relu6": lambda d, v: aten.hardtanh_backward.default(d, v, 0.0, 6.0),
}


def _empty(
    x: Tensor,
    expert: Tensor,
    routing: Tensor,
    up_layout: list[int],
    down_layout: list[int],
    experts: Any,
    dtype: torch.dtype,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    want_x, want_routing, want_up, want_down = wants
    dx = x.new_empty(x.shape if want_x else 0, dtype=dtype)
    d_routing = routing.new_empty(routing.shape if want_routing else 0)
    biases = [
        x.new_empty((experts, layout[0]) if want else 0, dtype=torch.float32)
        for layout, want in ((up_layout, want_up), (down_layout, want_down))
    ]
    return dx, d_routing, biases[0], biases[1]


@fake("experts_backward")
def _(
    grad: Tensor,
    codes: Sequence[Tensor],
    expert: Tensor,
    routing: Tensor,
    up: Tensor,
    up_layout: list[int],
    up_bias: Tensor | None,
    down: Tensor,
    down_layout: list[int],
    down_bias: Tensor | None,
    code: Sequence[int],
    down_code: Sequence[int],
    activation: str,
    gate: str,
    limit: float,
    shift: float,
    dtype: torch.dtype,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty(codes[0], expert, routing, up_layout, down_layout, up.shape[0], dtype, wants)


no_gradient("experts_backward", "compute it in float")


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, expert, routing, up, up_layout, up_bias, down, down_layout, down_bias = inputs[:9]
    code, down_code, activation, gate, _, limit, shift = inputs[9:]
    leaves = (x, routing, up_bias, down_bias)
    ctx.wants = [t is not None and t.requires_grad for t in leaves]
    ctx.dtypes = [None if t is None else t.dtype for t in leaves]
    ctx.layouts, ctx.how = (up_layout, down_layout), (code, down_code, activation, gate)
    ctx.clip = (limit, shift)
    codes = ops.quantize(x.detach(), code)
    ctx.save_for_backward(expert, routing, up, up_bias, down, down_bias, *codes)
    ctx.set_materialize_grads(False)


def _formula(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
    """Computes (X4): the gradients of x, the routing weights and both biases."""
    gradients: list[Tensor | None] = [None] * 16
    if grad is None:
        return tuple(gradients)
    expert, routing, up, up_bias, down, down_bias, *codes = ctx.saved_tensors
    up_layout, down_layout = ctx.layouts
    weights = (up, up_layout, up_bias, down, down_layout, down_bias)
    how = (*ctx.how, *ctx.clip, ctx.dtypes[0], ctx.wants)
    found = ops.experts_backward(grad, codes, expert, routing, *weights, *how)
    for place, d, dtype, want in zip((0, 2, 5, 8), found, ctx.dtypes, ctx.wants, strict=True):
        gradients[place] = d.to(dtype) if want else None
    return tuple(gradients)


gradient("experts", _setup, _formula)
