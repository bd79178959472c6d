"""Linears on CUDA that run as float matmuls: those with float activations of more rows than the
kernels for few rows are made for.

The CUDA operators call these functions by name (csrc/cuda/ops/float_linear.cpp). A kernel writes
the values of a weight of 4 or 5 bits, whose packed weight has the layout of the CPU, so such a
linear is not faster than float. `linear` passes the values of its codes as x. Outputs are within
the roundings of a float matmul of (W1), or of (W5).
"""

from __future__ import annotations

import torch
from torch import Tensor

from qfx.graph.activations import activate
from qfx.ops.weight import pack_weight, unpack_weight

_LIBRARY = torch.library.Library("qfx", "FRAGMENT")


def _sums(x: Tensor, w: Tensor) -> Tensor:
    """Computes x @ w.T, float32 [..., N], from x [..., K] float and w [N, K] of floats, or of int8,
    which every dtype of x holds. They are multiplied in the dtype of x, and added up in float32."""
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    if rows.is_cuda and rows.dtype in (torch.bfloat16, torch.float16):
        sums = torch.mm(rows, w.to(rows.dtype).t(), out_dtype=torch.float32)
    else:
        sums = rows.float() @ w.float().t()
    return sums.reshape(*x.shape[:-1], len(w))


def value_linear(
    x: Tensor, w: Tensor, bias: Tensor | None, activation: str, out_dtype: torch.dtype
) -> Tensor:
    """Computes act(x @ w.T + bias) [..., N] from x [..., K] float and the values w [N, K] of a
    weight of 4 or 5 bits, in the dtype of x. (W5)"""
    y = _sums(x, w)
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
    codes to the next, and the byte at which the scales begin. (W1)"""
    (codes_at, pitch, scale_at), k = places, x.shape[-1]
    codes = weight[codes_at : codes_at + n * pitch].view(n, pitch)[:, :k]
    scale = weight[scale_at : scale_at + 4 * n].view(torch.float32)
    y = _sums(x, codes) * scale
    return activate(activation, y if bias is None else y + bias.float()).to(out_dtype)


_RESULTS = "(Tensor, Tensor, Tensor, Tensor)"
for _schema, _function in {
    "low_bit_pack(Tensor codes, Tensor scale, Tensor? zero_point, Tensor? minimum, int bits, "
    "int group) -> Tensor": pack_weight,
    f"low_bit_unpack(Tensor weight, SymInt[] layout, SymInt k) -> {_RESULTS}": unpack_weight,
    "value_linear(Tensor x, Tensor w, Tensor? bias, str activation, ScalarType out_dtype) "
    "-> Tensor": value_linear,
    "weight_only_linear(Tensor x, Tensor weight, SymInt n, SymInt[] places, Tensor? bias, "
    "str activation, ScalarType out_dtype) -> Tensor": weight_only_linear,
}.items():  # fmt: skip
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_schema.partition("(")[0], _function, "CompositeExplicitAutograd")
