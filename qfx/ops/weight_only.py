"""int8_weight_linear: float activations times int8 weights. Reference, fake, gradient."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from qfx.ops.activations import activate
from qfx.ops.registry import linear_fake, no_gradient, reference
from qfx.ops.weight import GROUP, unpack_weight


@reference
def int8_weight_linear(
    x: Tensor,
    packed: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """x [..., K] float, w_scale float32 [N] -> act(x @ w.T * w_scale + bias) [..., N]. (W1)"""
    n, k = w_scale.numel(), x.shape[-1]
    sums = chains(x.float().reshape(x.shape[:-1].numel(), k), unpack_weight(packed, n, k))
    y = sums * w_scale
    y = y if bias is None else y + bias.float()
    return activate(activation, y).to(out_dtype).reshape(*x.shape[:-1], n)


def chains(x: Tensor, w: Tensor) -> Tensor:
    """s_0 + s_1 float32 [M, N] of x float32 [M, K] and integers w [N, K]. (W1)"""
    (m, k), n = x.shape, w.shape[0]
    groups = -(-k // GROUP)
    pad = (0, groups * GROUP - k)
    w_gjn = F.pad(w.double(), pad).reshape(n, groups, GROUP).permute(1, 2, 0)
    x_gmj = F.pad(x.double(), pad).reshape(m, groups, GROUP).transpose(0, 1)
    sums = torch.zeros(m, 2, n, dtype=torch.float32, device=x.device)
    for x_mj, w_jn in zip(x_gmj, w_gjn, strict=True):  # the products are exact in float64
        for j in (0, 1):
            terms = x_mj[:, j::2, None] * w_jn[j::2]
            sums = (sums.double() + terms).float()
    return sums[:, 0] + sums[:, 1]


linear_fake("int8_weight_linear")


no_gradient("int8_weight_linear")
