"""Linears on CUDA that run as float matmuls: those with weights of 4 and 5 bits, or with float
activations, of more rows than the kernels for few rows are made for.

The CUDA operators call these functions by name (csrc/cuda/ops/float_linear.cpp). A weight of 4 or 5
bits has the layout of the CPU; it is dequantized, so such a linear is not faster than float.
`linear` passes the values of its codes as x. Outputs are within the roundings of a float32 matmul
of (E4), or of (W1).
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


def weight_only_linear(
    x: Tensor,
    weight: Tensor,
    n: int,
    places: list[int],
    bias: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """Computes act(x @ w.T + bias) [..., N] from x [..., K] float and a packed weight of 8 bits
    with one scale per row. `places`: the byte at which the codes begin, the bytes from one row of
    codes to the next, and the byte at which the scales begin. (W1)

    bfloat16 and float16 hold every code, so the codes are multiplied in the dtype of x, and added
    up in float32."""
    (codes_at, pitch, scale_at), k = places, x.shape[-1]
    codes = weight[codes_at : codes_at + n * pitch].view(n, pitch)[:, :k]
    scale = weight[scale_at : scale_at + 4 * n].view(torch.float32)
    rows = x.reshape(-1, k)
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        sums = torch.mm(rows, codes.to(x.dtype).t(), out_dtype=torch.float32)
    else:
        sums = rows.float() @ codes.float().t()
    y = sums * scale
    y = activate(activation, y if bias is None else y + bias.float()).to(out_dtype)
    return y.reshape(*x.shape[:-1], n)


_RESULTS = "(Tensor, Tensor, Tensor, Tensor)"
for _schema, _function in {
    "low_bit_pack(Tensor codes, Tensor scale, Tensor? zero_point, Tensor? minimum, int bits, "
    "int group) -> Tensor": pack_weight,
    f"low_bit_unpack(Tensor weight, SymInt[] layout, SymInt k) -> {_RESULTS}": unpack_weight,
    "low_bit_linear(Tensor x, Tensor weight, SymInt[] layout, Tensor? bias, str activation, "
    "ScalarType out_dtype) -> Tensor": low_bit_linear,
    "weight_only_linear(Tensor x, Tensor weight, SymInt n, SymInt[] places, Tensor? bias, "
    "str activation, ScalarType out_dtype) -> Tensor": weight_only_linear,
}.items():  # fmt: skip
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_schema.partition("(")[0], _function, "CompositeExplicitAutograd")
