"""int8_bmm, int8_bmm_dynamic: batched matmuls of two activations, such as those of attention, in
int8. This module contains their references, fake implementations and gradients. See
docs/numerics.md (G2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qfx.ops.code import Code
from qfx.ops.quantize import dequantize, quantize
from qfx.ops.registry import fake, no_gradient, reference
from qfx.values.scheme import PER_TENSOR


@reference
def int8_bmm(a_q: Tensor, a_zero_point: Tensor, b_q: Tensor) -> Tensor:
    """Computes sum_k (a_q[m, k] - a_zero_point[m]) * b_q[n, k] exactly, for each matrix of a batch.
    (G2)

    a_q int8 [*B, M, K], a_zero_point int32, one value or one per row, b_q int8 [*B, N, K],
    symmetric -> int32 [*B, M, N].
    """
    one = a_zero_point.numel() == 1
    zero_point = a_zero_point.reshape(() if one else (*a_q.shape[:-1], 1))
    return ((a_q.long() - zero_point) @ b_q.long().mT).int()


@fake("int8_bmm")
def _(a_q: Tensor, a_zero_point: Tensor, b_q: Tensor) -> Tensor:
    return a_q.new_empty((*a_q.shape[:-1], b_q.shape[-2]), dtype=torch.int32)


@reference
def int8_bmm_dynamic(
    a: Tensor,
    b: Tensor,
    axes: Sequence[int],
    bits: int,
    symmetric: bool,
    b_bits: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """Multiplies a [*B, M, K] by the transpose of b [*B, N, K], both float, in int8 -> out_dtype
    [*B, M, N].

    The result is dequantize(int8_bmm(quantize(a), quantize(b))), where b is symmetric with one
    scale per row of K. (E1)
    """
    code = Code(bits, int(symmetric), int(tuple(axes) == PER_TENSOR))
    a_q, a_scale, a_zero_point = quantize(a, code)
    b_q, b_scale, _ = quantize(b, Code(b_bits))
    acc = int8_bmm(a_q, a_zero_point, b_q)
    return dequantize(acc, a_scale, None, b_scale.mT, None, "none", out_dtype)


@fake("int8_bmm_dynamic")
def _(
    a: Tensor,
    b: Tensor,
    axes: Sequence[int],
    bits: int,
    symmetric: bool,
    b_bits: int,
    out_dtype: torch.dtype,
) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-2]), dtype=out_dtype)


no_gradient("int8_bmm_dynamic")
