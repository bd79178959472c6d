"""The values of a packed weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qfx.ops.layout import Layout
from qfx.ops.single_tensors import Quantized, dequantize
from qfx.values.scheme import QSpec

ops = torch.ops.qfx


def weight_values(weight: Tensor, layout: Sequence[int], k: int, dtype: torch.dtype) -> Tensor:
    """Dequantizes a packed weight: returns w^ [N, K], the values that its codes represent.
    Equations (Q5) (Q14)."""
    fields = Layout(*layout)
    codes, scale, zero, minimum = ops.unpack_weight(weight, list(layout), k)
    found = Quantized(codes, scale, zero, QSpec(group=fields.scale_group))
    if not fields.low_bit:
        return dequantize(found, dtype)
    least = minimum.repeat_interleave(fields.group, 1)[:, :k]
    return (dequantize(found) + least).to(dtype)
