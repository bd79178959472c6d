"""Codes whose groups of K have scales of their own: quantize_groups, int8_linear_groups,
int8_linear_groups_dynamic. References, fakes, gradients. docs/numerics.md."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from qfx.ops.activations import activate
from qfx.ops.quantize import quantize
from qfx.ops.registry import fake, linear_fake, no_gradient, reference
from qfx.ops.rotation import rotate
from qfx.ops.weight import group_of, unpack_weight
from qfx.values.scheme import PER_ROW


@reference
def quantize_groups(
    x: Tensor,
    group: int,
    bits: int,
    symmetric: bool,
    factor: Tensor | None = None,
    rotation: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., K] -> codes q int8 [..., K], scale float32 and zero_point int32 [..., G]. (Q1)-(Q4)

    As `quantize` per row of each `group` elements of K, a multiple of 32; G = ceil(K / group), the
    last group perhaps shorter. Of rotate(x.float(), factor, rotation) (R1).
    """
    k = x.shape[-1]
    rows = rotate(x.float(), factor, rotation).reshape(x.shape[:-1].numel(), k)
    groups = -(-k // group)
    inside = F.pad(rows, (0, groups * group - k)).reshape(rows.shape[0] * groups, group)
    q, scale, zero_point = quantize(inside, PER_ROW, bits, symmetric)
    q = q.reshape(rows.shape[0], groups * group)[:, :k]
    shape = (*x.shape[:-1], groups)
    return q.reshape(x.shape), scale.reshape(shape), zero_point.reshape(shape)


@fake("quantize_groups")
def _(
    x: Tensor,
    group: int,
    bits: int,
    symmetric: bool,
    factor: Tensor | None = None,
    rotation: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (*x.shape[:-1], -(-x.shape[-1] // group))
    scale = x.new_empty(shape, dtype=torch.float32)
    return x.new_empty(x.shape, dtype=torch.int8), scale, x.new_empty(shape, dtype=torch.int32)


@reference
def int8_linear_groups(
    q: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    packed: Tensor,
    w_scale: Tensor,
    w_zero: Tensor | None,
    bias: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """q int8 [..., K], w_scale float32, w_zero int32 [N, G] or [N, 1] -> out_dtype [..., N]. (E3)

    `packed` is `pack_weight(codes, group)`, G = ceil(K / group); 1 if it was packed without.
    scale float32 and zero_point int32: [..., G], [..., 1], or one for all.
    """
    n, k = w_scale.shape[0], q.shape[-1]
    w, group = unpack_weight(packed, n, k), group_of(packed, k)
    sums = sums_of_groups(q, scale, zero_point, w, w_scale, w_zero, group)
    y = sums if bias is None else sums + bias.float()
    return activate(activation, y).to(out_dtype).reshape(*q.shape[:-1], n)


def sums_of_groups(
    q: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_zero: Tensor | None,
    group: int,
) -> Tensor:
    """The sums float32 [M, N] of (E3), of codes w int8 [N, K]."""
    (n, k), m = w.shape, q.shape[:-1].numel()
    groups = -(-k // group)
    scale_mg, zero_mg = (of_groups(v, m, groups) for v in (scale, zero_point))
    w_scale = w_scale.expand(n, groups)
    w_zero = w_scale.new_zeros(n, 1) if w_zero is None else w_zero
    w_zero_ng = w_zero.long().expand(n, groups)
    rows, sums = q.reshape(m, k).long(), w_scale.new_zeros(m, n)
    for g in range(groups):
        inside = slice(g * group, (g + 1) * group)
        w_g = w[:, inside].long() - w_zero_ng[:, g, None]
        exact = ((rows[:, inside] - zero_mg[:, g, None]) @ w_g.t()).int().float()
        sums = fma(exact, scale_mg[:, g, None] * w_scale[:, g], sums)
    return sums


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a b + c of float32, rounded once, or nearly always so: (E3)."""
    return (c.double() + a.double() * b.double()).float()


def of_groups(values: Tensor, m: int, groups: int) -> Tensor:
    """[M, G] of one value, one for each row, or one for each group of each row."""
    if values.numel() != m * groups:
        values = values.reshape(-1, 1).expand(m, groups)
    return values.reshape(m, groups)


linear_fake("int8_linear_groups")


@reference
def int8_linear_groups_dynamic(
    x: Tensor,
    packed: Tensor,
    w_scale: Tensor,
    w_zero: Tensor | None,
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
    """int8_linear_groups of quantize_groups(x), or of quantize(x) where `group` is 0.

    x [..., K] float -> out_dtype [..., N]. The weight was packed in groups of `group`, for x
    transformed by factor and rotation (R1).
    """
    if group:
        codes = quantize_groups(x, group, bits, symmetric, factor, rotation)
    else:
        codes = quantize(x, axes, bits, symmetric, factor, rotation)
    return int8_linear_groups(*codes, packed, w_scale, w_zero, bias, activation, out_dtype)


linear_fake("int8_linear_groups_dynamic")


no_gradient("quantize_groups")
no_gradient("int8_linear_groups")
no_gradient("int8_linear_groups_dynamic")
