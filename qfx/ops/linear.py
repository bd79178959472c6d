"""Linears with packed weights: int8_mm, linear, linear_dynamic, linears, linear_float,
linear_requantize. This module contains their references, fake implementations and gradients. See
docs/numerics.md (E1) (E3) (E4) (W1) (W3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qfx.graph.activations import activate
from qfx.ops.layout import Layout, each_layout
from qfx.ops.quantize import dequantize, quantize
from qfx.ops.registry import fake, linear_fake, no_gradient, reference
from qfx.ops.sums import chains, fma, of_groups, sums_of_groups
from qfx.ops.weight import unpack_weight, weight_scale


@reference
def int8_mm(q: Tensor, zero_point: Tensor, weight: Tensor, n: int) -> Tensor:
    """Computes sum_k (q[m, k] - zero_point[m]) * w[n, k] exactly: q int8 [..., K] -> int32 [...,
    n]. (G1)

    `weight` has one scale for each row, returned by `weight_scale`, and no zero points.
    """
    w, *_ = unpack_weight(weight, Layout(n), q.shape[-1])
    rows = q.reshape(q.shape[:-1].numel(), q.shape[-1]).long() - zero_point.reshape(-1, 1)
    return (rows @ w.long().t()).int().reshape(*q.shape[:-1], n)


@fake("int8_mm")
def _(q: Tensor, zero_point: Tensor, weight: Tensor, n: int) -> Tensor:
    return q.new_empty((*q.shape[:-1], n), dtype=torch.int32)


@reference
def linear(
    q: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    weight: Tensor,
    layout: Sequence[int],
    bias: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiplies q int8 [..., K] by a packed weight [N, K] -> out_dtype [..., N]. (E1) (E3) (E4)

    The scale float32 and zero_point int32 of q are [..., 1], one for all, or [..., G] if the weight
    is cut into groups of K.
    """
    fields = Layout(*layout)
    if fields.one_scale:
        acc = int8_mm(q, zero_point, weight, fields.n)
        w_scale = weight_scale(weight, fields.n)
        return dequantize(acc, scale, None, w_scale, bias, activation, out_dtype)
    sums = _sums(q, scale, zero_point, weight, fields)
    return _finished(sums, q, bias, activation, out_dtype)


def _sums(q: Tensor, scale: Tensor, zero_point: Tensor, weight: Tensor, fields: Layout) -> Tensor:
    """Returns the sums float32 [M, N] over groups of K and minimums. (E3) (E4)"""
    k, m = q.shape[-1], q.shape[:-1].numel()
    codes, w_scale, w_zero, minimum = unpack_weight(weight, fields, k)
    group = fields.group or max(k, 1)
    sums = sums_of_groups(q, scale, zero_point, codes, w_scale, w_zero, group)
    if not fields.low_bit:
        return sums
    groups = w_scale.shape[1]
    scale_mg, zero_mg = (of_groups(v, m, groups) for v in (scale, zero_point))
    for g in range(groups):
        inside = q.reshape(m, k)[:, g * group : (g + 1) * group].long()
        of_x = (inside - zero_mg[:, g, None]).sum(1, keepdim=True).float()
        sums = fma(of_x, scale_mg[:, g, None] * minimum[:, g], sums)
    return sums


def _finished(
    sums: Tensor, x: Tensor, bias: Tensor | None, activation: str, out_dtype: torch.dtype
) -> Tensor:
    y = sums if bias is None else sums + bias.float()
    return activate(activation, y).to(out_dtype).reshape(*x.shape[:-1], sums.shape[1])


@reference
def linear_dynamic(
    x: Tensor,
    weight: Tensor,
    layout: Sequence[int],
    bias: Tensor | None,
    code: Sequence[int],
    activation: str,
    out_dtype: torch.dtype,
    factor: Tensor | None = None,
) -> Tensor:
    """Computes linear(quantize(x, code)): x [..., K] float -> out_dtype [..., N].

    The weight must be made for x transformed by `factor` [K] and the code's rotation (R1).
    """
    codes = quantize(x, code, factor=factor)
    return linear(*codes, weight, layout, bias, activation, out_dtype)


@reference
def linears(
    x: Tensor,
    weight: Sequence[Tensor],
    layout: Sequence[int],
    bias: Sequence[Tensor | None],
    code: Sequence[int],
    activation: Sequence[str],
    out_dtype: torch.dtype,
    factor: Tensor | None = None,
) -> list[Tensor]:
    """Computes linear_dynamic with each of several weights: x [..., K] float -> a list of out_dtype
    [..., N].

    x is quantized once. `layout`: the five numbers of each weight. The weights must be made for x
    transformed by `factor` [K] and the code's rotation (R1).
    """
    codes = quantize(x, code, factor=factor)
    each = zip(weight, each_layout(layout), bias, activation, strict=True)
    return [linear(*codes, w, fields, b, act, out_dtype) for w, fields, b, act in each]


@fake("linears")
def _(
    x: Tensor,
    weight: Sequence[Tensor],
    layout: Sequence[int],
    bias: Sequence[Tensor | None],
    code: Sequence[int],
    activation: Sequence[str],
    out_dtype: torch.dtype,
    factor: Tensor | None = None,
) -> list[Tensor]:
    rows = x.shape[:-1]
    return [x.new_empty((*rows, fields.n), dtype=out_dtype) for fields in each_layout(layout)]


@reference
def linear_float(
    x: Tensor,
    weight: Tensor,
    layout: Sequence[int],
    bias: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """Computes act(x @ w.T + bias) [..., N] from x [..., K] float and a weight with one scale for
    each row and no zero points (W1), or a weight of fewer than 8 bits (W3)."""
    fields = Layout(*layout)
    rows = x.float().reshape(x.shape[:-1].numel(), x.shape[-1])
    codes, w_scale, w_zero, minimum = unpack_weight(weight, layout, x.shape[-1])
    if not fields.low_bit:
        sums = chains(rows, codes) * w_scale[:, 0]
        return _finished(sums, x, bias, activation, out_dtype)
    sums = rows.new_zeros(rows.shape[0], fields.n)
    cuts = [slice(i, i + fields.group) for i in range(0, x.shape[-1], fields.group)]
    for g, cut in enumerate(cuts):
        sums = fma(chains(rows[:, cut], codes[:, cut] - w_zero[:, g, None]), w_scale[:, g], sums)
    for g, cut in enumerate(cuts):
        of_x = chains(rows[:, cut], torch.ones_like(codes[:1, cut]))
        sums = fma(of_x, minimum[:, g], sums)
    return _finished(sums, x, bias, activation, out_dtype)


@reference
def linear_requantize(
    q: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    weight: Tensor,
    layout: Sequence[int],
    bias: Tensor | None,
    activation: str,
    out_scale: Tensor,
    out_zero_point: Tensor | None,
    out_code: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes quantize(linear(q), out_code, out_scale, out_zero_point): codes for a following
    linear. (E1) (Q6)"""
    y = linear(q, scale, zero_point, weight, layout, bias, activation, torch.float32)
    return quantize(y, out_code, out_scale, out_zero_point)


@fake("linear_requantize")
def _(
    q: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    weight: Tensor,
    layout: Sequence[int],
    bias: Tensor | None,
    activation: str,
    out_scale: Tensor,
    out_zero_point: Tensor | None,
    out_code: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    row = (*q.shape[:-1], 1)
    return (
        q.new_empty((*q.shape[:-1], layout[0])),
        scale.new_empty(row),
        zero_point.new_empty(row),
    )


for _name in ("linear", "linear_dynamic", "linear_float"):
    linear_fake(_name)
    no_gradient(_name)
for _name in ("linears", "linear_requantize"):
    no_gradient(_name)
