"""Linears of experts: linear_experts, experts. This module contains their references and fake
implementations, and the packed weights of a stack of experts. Their gradients are in
`qfx.ops.experts_ste` and `qfx.ops.experts_backward`. See docs/numerics.md (X1) (X2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from qfx.graph.activations import activate
from qfx.io.huge_pages import Room, huge_page_size, into_huge_pages
from qfx.ops.layout import Layout
from qfx.ops.linear import linear, linear_dynamic
from qfx.ops.quantize import quantize
from qfx.ops.registry import fake, linear_fake, reference

GATES = ("none", "halves", "interleaved")


def stack_packed(weights: Iterable[Tensor], experts: int) -> Tensor:
    """Returns the packed weights of so many experts, all of one layout, as one tensor int8 [E,
    bytes].

    `weights` are read one after the other, so that no more than one exists besides the result. On
    the CPU that is in huge pages, where the system has them, because calls read parts of it.
    """
    stacked = torch.empty(0, 0, dtype=torch.int8, device="cpu")
    for e, weight in enumerate(weights):
        if e == 0:
            stacked = _new_stack(weight, experts)
        stacked[e] = weight
    if _has_memory(stacked):
        into_huge_pages([(stacked.data_ptr(), stacked.nbytes)])  # memory that was used before
    return stacked


def _new_stack(weight: Tensor, experts: int) -> Tensor:
    shape, size = (experts, weight.numel()), huge_page_size()
    if _has_memory(weight) and 0 < size <= experts * weight.numel():
        return Room(experts * weight.numel()).empty(shape, torch.int8)
    return weight.new_empty(shape)


def _has_memory(t: Tensor) -> bool:
    return type(t) is Tensor and t.device.type == "cpu"


@reference
def linear_experts(
    x: Tensor,
    weight: Tensor,
    layout: Sequence[int],
    offsets: Tensor,
    bias: Tensor | None,
    code: Sequence[int],
    activation: str,
    out_dtype: torch.dtype,
    factor: Tensor | None = None,
) -> Tensor:
    """Multiplies rows x float [R, K], sorted by expert, by the packed weight [N, K] of the expert
    of each -> out_dtype [R, N]. (X1)

    `weight`: int8 [E, bytes], a packed weight for each expert. `offsets`: int32 [E], where the rows
    of each end; the rows after the last end become 0. `bias`: [E, N].
    """
    codes = quantize(x, code, factor=factor)
    y, begin = x.new_zeros(x.shape[0], layout[0], dtype=out_dtype), 0
    for e, end in enumerate(offsets.tolist()):
        triple = (part[begin:end] for part in codes)
        b = None if bias is None else bias[e]
        y[begin:end] = linear(*triple, weight[e], layout, b, activation, out_dtype)
        begin = end
    return y


@reference
def experts(
    x: Tensor,
    expert: Tensor,
    routing: Tensor,
    up: Tensor,
    up_layout: Sequence[int],
    up_bias: Tensor | None,
    down: Tensor,
    down_layout: Sequence[int],
    down_bias: Tensor | None,
    code: Sequence[int],
    down_code: Sequence[int],
    activation: str,
    gate: str,
    out_dtype: torch.dtype,
    limit: float = 0.0,
    shift: float = 0.0,
) -> Tensor:
    """Computes a block of experts: tokens x float [T, K] -> out_dtype [T, N]. (X2)

    Slot s of token t goes to the expert `expert[t, s]`, int64 [T, S], with the weight `routing[t,
    s]`. An expert from E on does not exist, and its slot adds nothing. `up` and `down`: a packed
    weight for each expert, [G I, K] and [N, I], where G = 2 with a gate. `gate`: "halves" if the
    first I outputs of `up` are gates, "interleaved" if every other one is, from the first, or
    "none". `limit`: of gates from above, and of the magnitude of what they multiply, to which
    `shift` is added; 0 for none.
    """
    codes = quantize(x, code)
    sums = x.new_zeros(x.shape[0], down_layout[0], dtype=torch.float32)
    weights = [(up_layout, up, up_bias), (down_layout, down, down_bias)]
    for s in range(expert.shape[1]):
        for e in expert[:, s].unique().tolist():
            if e >= up.shape[0]:
                continue
            rows = (expert[:, s] == e).nonzero()[:, 0]
            triple = (part[rows] for part in codes)
            (n, packed, bias), (m, last, last_bias) = (
                (layout, stack[e], None if b is None else b[e]) for layout, stack, b in weights
            )
            u = linear(*triple, packed, n, bias, "none", torch.float32)
            h = gated(u, activation, gate, limit, shift)
            y = linear_dynamic(h, last, m, last_bias, down_code, "none", torch.float32)
            sums[rows] += routing[rows, s, None].float() * y
    return sums.to(out_dtype)


def gated(u: Tensor, activation: str, gate: str, limit: float, shift: float) -> Tensor:
    """Returns h [R, I] of the outputs u float32 of an expert's first product. (X2)"""
    most = limit or float("inf")
    if gate == "none":
        return activate(activation, u.clamp(max=most))
    g, v = (u[:, ::2], u[:, 1::2]) if gate == "interleaved" else u.chunk(2, dim=1)
    return activate(activation, g.clamp(max=most)) * (v.clamp(-most, most) + shift)


@fake("experts")
def _(
    x: Tensor,
    expert: Tensor,
    routing: Tensor,
    up: Tensor,
    up_layout: Sequence[int],
    up_bias: Tensor | None,
    down: Tensor,
    down_layout: Sequence[int],
    down_bias: Tensor | None,
    code: Sequence[int],
    down_code: Sequence[int],
    activation: str,
    gate: str,
    out_dtype: torch.dtype,
    limit: float = 0.0,
    shift: float = 0.0,
) -> Tensor:
    return x.new_empty((x.shape[0], Layout(*down_layout).n), dtype=out_dtype)


linear_fake("linear_experts")
