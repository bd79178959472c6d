"""The operators of 4- and 5-bit weights on CUDA: right, and no faster than the float matmul of the
values that codes stand for, which is what they are. No kernels were written for them yet.

The packed weight is that of the CPU. Outputs are within the roundings of a float32 matmul of (E4).
"""

from __future__ import annotations

import torch
from torch import Tensor

from qfx.ops.activations import activate
from qfx.ops.groups import of_groups
from qfx.ops.lowbit_packing import pack_lowbit, unpack_lowbit

_CUDA = torch.library.Library("qfx", "IMPL")


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
    m, k = q.shape[:-1].numel(), q.shape[-1]
    groups = -(-k // w_group)

    def each(values: Tensor) -> Tensor:
        return of_groups(values, m, groups).repeat_interleave(w_group, 1)[:, :k]

    x = (q.reshape(m, k).int() - each(zero_point)) * each(scale)
    y = _product(x.reshape(q.shape), packed, n, w_group, bias, activation)
    return y.to(out_dtype)


def lowbit_linear_ste(
    x: Tensor,
    bias: Tensor | None,
    x_step: Tensor | None,
    q: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    packed: Tensor,
    n: int,
    w_bits: int,
    w_group: int,
    bits: int,
    symmetric: bool,
    out_dtype: torch.dtype,
    factor: Tensor | None = None,
    rotation: int = 0,
) -> Tensor:
    weight = (packed, n, w_bits, w_group)
    return lowbit_linear(q, scale, zero_point, *weight, bias, "none", out_dtype)


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
    return _product(x.float(), packed, n, w_group, bias, activation).to(out_dtype)


def _product(
    x: Tensor, packed: Tensor, n: int, group: int, bias: Tensor | None, activation: str
) -> Tensor:
    codes, scale, zero, minimum = unpack_lowbit(packed, n, x.shape[-1], group)
    scale, zero, minimum = (
        values.repeat_interleave(group, 1)[:, : codes.shape[1]] for values in (scale, zero, minimum)
    )
    y = x @ ((codes - zero) * scale + minimum).t()
    return activate(activation, y if bias is None else y + bias.float())


for _function in (
    pack_lowbit, unpack_lowbit, lowbit_linear, lowbit_linear_ste, lowbit_weight_linear,
):  # fmt: skip
    _CUDA.impl(_function.__name__, _function, "CUDA")
