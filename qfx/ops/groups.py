"""int8_linear_groups: a weight with a scale, and perhaps a zero point, for each group of K."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from qfx.ops.quantize import ACTIVATIONS, quantize
from qfx.ops.registry import fake, no_gradient, reference
from qfx.ops.weight import K_MULTIPLE, group_of, unpack_weight
from qfx.scheme import PER_ROW


def quantize_groups(
    w: Tensor, group: int, bits: int, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """w [N, K] -> codes int8 [N, K], scale float32 [N, G], zero point int32 [N, G]: (Q1)-(Q4) of
    each row of each group.

    `group`: elements of K that share a scale, a multiple of 64, or 0 for all of them, else
    ValueError; G = ceil(K / group). Scales lie column by column, as the kernels read them.
    """
    if group < 0 or group % K_MULTIPLE:
        raise ValueError(
            f"quantize_groups: group={group}, expected 0 (one scale for all of K) or a multiple of "
            f"{K_MULTIPLE}"
        )
    n, k = w.shape
    step = group or max(k, 1)
    groups = -(-k // step)
    parts = F.pad(w, (0, groups * step - k)).reshape(n * groups, step)
    q, scale, zero_point = quantize(parts, PER_ROW, bits, symmetric)
    codes = q.reshape(n, groups * step)[:, :k].contiguous()
    by_column = (v.reshape(n, groups).t().contiguous().t() for v in (scale, zero_point))
    return codes, *by_column


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
    """q int8 [..., K], w_scale float32 and w_zero int32 [N, G] -> out_dtype [..., N]. (E3)

    `packed` is `pack_weight(codes, group)`, and G = ceil(K / group); 1 if it was packed without.
    """
    (n, groups), k = w_scale.shape, q.shape[-1]
    w, group = unpack_weight(packed, n, k).long(), group_of(packed, k)
    rows = q.reshape(q.shape[:-1].numel(), k).long() - zero_point.reshape(-1, 1)
    sums = torch.zeros(rows.shape[0], n)
    for g in range(groups):
        inside = slice(g * group, (g + 1) * group)
        w_g = w[:, inside] if w_zero is None else w[:, inside] - w_zero[:, g, None]
        sums = sums + (rows[:, inside] @ w_g.t()).int().float() * w_scale[:, g]
    y = sums * scale.reshape(-1, 1)
    y = y if bias is None else y + bias.float()
    return ACTIVATIONS[activation](y).to(out_dtype).reshape(*q.shape[:-1], n)


@fake("int8_linear_groups")
def _(
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
    return q.new_empty((*q.shape[:-1], w_scale.shape[0]), dtype=out_dtype)


no_gradient("int8_linear_groups")
