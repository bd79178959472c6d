"""int8_linear_groups: a weight with a scale, and perhaps a zero point, for each group of K."""

from __future__ import annotations

import torch
from torch import Tensor

from qfx.ops.activations import activate
from qfx.ops.registry import fake, no_gradient, reference
from qfx.ops.weight import group_of, unpack_weight


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
    return activate(activation, y).to(out_dtype).reshape(*q.shape[:-1], n)


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
