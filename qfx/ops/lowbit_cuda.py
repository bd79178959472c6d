"""Linears with weights of 4 and 5 bits on CUDA, for which there are no kernels yet. They dequantize
the weight and run a float matmul, so they are not faster than float.

The packed weight has the layout of the CPU. The CUDA operators call these functions by name for
such weights (csrc/cuda/ops/lowbit.cpp); `linear` passes the values of its codes as x. Outputs are
within the roundings of a float32 matmul of (E4).
"""

from __future__ import annotations

import torch
from torch import Tensor

from qfx.graph.activations import activate
from qfx.ops.weight import pack_weight, unpack_weight

_LIBRARY = torch.library.Library("qfx", "FRAGMENT")


def low_bit_linear(
    x: Tensor,
    weight: Tensor,
    layout: list[int],
    bias: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """Computes act(x @ w.T + bias) [..., N] from x [..., K] float and a packed weight of 4 or 5
    bits."""
    k, group = x.shape[-1], layout[2]
    codes, *of_groups = unpack_weight(weight, layout, k)
    scale, zero, minimum = (v.repeat_interleave(group, 1)[:, :k] for v in of_groups)
    y = x.float() @ ((codes - zero) * scale + minimum).t()
    return activate(activation, y if bias is None else y + bias.float()).to(out_dtype)


_RESULTS = "(Tensor, Tensor, Tensor, Tensor)"
for _schema, _function in {
    "low_bit_pack(Tensor codes, Tensor scale, Tensor? zero_point, Tensor? minimum, int bits, "
    "int group) -> Tensor": pack_weight,
    f"low_bit_unpack(Tensor weight, SymInt[] layout, SymInt k) -> {_RESULTS}": unpack_weight,
    "low_bit_linear(Tensor x, Tensor weight, SymInt[] layout, Tensor? bias, str activation, "
    "ScalarType out_dtype) -> Tensor": low_bit_linear,
}.items():  # fmt: skip
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_schema.partition("(")[0], _function, "CompositeExplicitAutograd")
