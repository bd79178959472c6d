"""Linears of weights of 4 and 5 bits in groups of K: lowbit_linear, lowbit_linear_dynamic,
lowbit_weight_linear. References, fakes. docs/numerics.md (E4) (W3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qfx.ops.activations import activate
from qfx.ops.groups import fma, of_groups, quantize_groups, sums_of_groups
from qfx.ops.lowbit_packing import unpack_lowbit
from qfx.ops.quantize import quantize
from qfx.ops.registry import linear_fake, no_gradient, reference
from qfx.ops.weight_only import chains


@reference
def lowbit_linear(
    q: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    packed: Tensor,
    n: int,
    w_bits: int,
    w_group: int,
    bias: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """q int8 [..., K] -> out_dtype [..., N], by the codes, scales and shifts in `packed`. (E4)

    `packed` is `pack_lowbit` of `w_bits` in groups of `w_group`, G of them. scale float32 and
    zero_point int32: [..., G], [..., 1], or one for all.
    """
    k, m = q.shape[-1], q.shape[:-1].numel()
    codes, w_scale, w_zero, minimum = unpack_lowbit(packed, n, k, w_group)
    sums = sums_of_groups(q, scale, zero_point, codes, w_scale, w_zero, w_group)
    groups = w_scale.shape[1]
    scale_mg, zero_mg = (of_groups(v, m, groups) for v in (scale, zero_point))
    for g in range(groups):
        inside = q.reshape(m, k)[:, g * w_group : (g + 1) * w_group].long()
        of_x = (inside - zero_mg[:, g, None]).sum(1, keepdim=True).float()
        sums = fma(of_x, scale_mg[:, g, None] * minimum[:, g], sums)
    return _finished(sums, q, bias, activation, out_dtype)


def _finished(
    sums: Tensor, x: Tensor, bias: Tensor | None, activation: str, out_dtype: torch.dtype
) -> Tensor:
    y = sums if bias is None else sums + bias.float()
    return activate(activation, y).to(out_dtype).reshape(*x.shape[:-1], sums.shape[1])


linear_fake("lowbit_linear")


@reference
def lowbit_linear_dynamic(
    x: Tensor,
    packed: Tensor,
    n: int,
    w_bits: int,
    w_group: int,
    bias: Tensor | None,
    axes: Sequence[int],
    group: int,
    bits: int,
    symmetric: bool,
    activation: str,
    out_dtype: torch.dtype,
    factor: Tensor | None = None,
    rotation: int = 0,
) -> Tensor:
    """lowbit_linear of quantize_groups(x), or of quantize(x) where `group` is 0.

    x [..., K] float -> out_dtype [..., N]. The weight is one for x transformed by factor and
    rotation (R1).
    """
    if group:
        codes = quantize_groups(x, group, bits, symmetric, factor, rotation)
    else:
        codes = quantize(x, axes, bits, symmetric, factor, rotation)
    weight = (packed, n, w_bits, w_group)
    return lowbit_linear(*codes, *weight, bias, activation, out_dtype)


linear_fake("lowbit_linear_dynamic")


@reference
def lowbit_weight_linear(
    x: Tensor,
    packed: Tensor,
    n: int,
    w_bits: int,
    w_group: int,
    bias: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """x [..., K] float -> act(x @ w.T + bias) [..., N], by the codes, scales and shifts in
    `packed`. (W3)"""
    k, rows = x.shape[-1], x.float().reshape(x.shape[:-1].numel(), x.shape[-1])
    codes, w_scale, w_zero, minimum = unpack_lowbit(packed, n, k, w_group)
    sums = rows.new_zeros(rows.shape[0], n)
    cuts = [slice(i, i + w_group) for i in range(0, k, w_group)]
    for g, cut in enumerate(cuts):
        sums = fma(chains(rows[:, cut], codes[:, cut] - w_zero[:, g, None]), w_scale[:, g], sums)
    for g, cut in enumerate(cuts):
        of_x = chains(rows[:, cut], torch.ones_like(codes[:1, cut]))
        sums = fma(of_x, minimum[:, g], sums)
    return _finished(sums, x, bias, activation, out_dtype)


linear_fake("lowbit_weight_linear")


for _name in ("pack_lowbit", "lowbit_linear", "lowbit_linear_dynamic"):
    no_gradient(_name, "use qfx::lowbit_linear_ste, as the qfx backend does by itself")
no_gradient("lowbit_weight_linear")
