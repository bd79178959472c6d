"""Sums of products in the order of the kernels: over groups of K (E3), and chains of fused
multiply-adds (W1). The references of linears use them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

QUAD = 4  # consecutive k; each chain takes every other two


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Returns a b + c of float32, the fused multiply-add of (E3). The result is rounded once in
    nearly all cases."""
    return (c.double() + a.double() * b.double()).float()


def sums_of_groups(
    q: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_zero: Tensor,
    group: int,
) -> Tensor:
    """Returns the sums float32 [M, N] of (E3) for codes w int8 [N, K], w_scale and w_zero [N, G] or
    [N, 1]."""
    (n, k), m = w.shape, q.shape[:-1].numel()
    groups = -(-k // group)
    scale_mg, zero_mg = (of_groups(v, m, groups) for v in (scale, zero_point))
    w_scale, w_zero_ng = w_scale.expand(n, groups), w_zero.long().expand(n, groups)
    rows, sums = q.reshape(m, k).long(), w_scale.new_zeros(m, n)
    for g in range(groups):
        inside = slice(g * group, (g + 1) * group)
        w_g = w[:, inside].long() - w_zero_ng[:, g, None]
        exact = ((rows[:, inside] - zero_mg[:, g, None]) @ w_g.t()).int().float()
        sums = fma(exact, scale_mg[:, g, None] * w_scale[:, g], sums)
    return sums


def of_groups(values: Tensor, m: int, groups: int) -> Tensor:
    """Expands one value, one per row, or one per group of each row, to [M, G]."""
    if values.numel() != m * groups:
        values = values.reshape(-1, 1).expand(m, groups)
    return values.reshape(m, groups)


def chains(x: Tensor, w: Tensor) -> Tensor:
    """Returns s_0 + s_1 float32 [M, N] for x float32 [M, K] and integers w [N, K]. (W1)"""
    (m, k), n = x.shape, w.shape[0]
    quads = -(-k // QUAD)
    pad = (0, quads * QUAD - k)
    w_gjn = F.pad(w.double(), pad).reshape(n, quads, QUAD).permute(1, 2, 0)
    x_gmj = F.pad(x.double(), pad).reshape(m, quads, QUAD).transpose(0, 1)
    sums = torch.zeros(m, 2, n, dtype=torch.float32, device=x.device)
    for x_mj, w_jn in zip(x_gmj, w_gjn, strict=True):  # the products are exact in float64
        for j in (0, 1):
            terms = x_mj[:, j::2, None] * w_jn[j::2]
            sums = (sums.double() + terms).float()
    return sums[:, 0] + sums[:, 1]
