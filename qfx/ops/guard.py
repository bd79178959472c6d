"""linear_guarded: a linear that runs those rows of x in float whose error in int8 may be too large.
This module contains the reference, the fake implementation, the gradient and the error bound
(B5)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from qfx.graph.activations import activate
from qfx.ops.code import Code
from qfx.ops.linear import linear_dynamic
from qfx.ops.quantize import code_range, quantize
from qfx.ops.registry import linear_fake, no_gradient, reference


def relative_bound(
    x: Tensor, error: Tensor, code: Sequence[int], factor: Tensor | None = None
) -> Tensor:
    """Returns for each row of x [..., K] a bound g_m, float64 [M]: int8 changes the output n of row
    m by at most g_m |x_m| |w_n|. Equation (B5).

    `error`, float32 [2]: two numbers of the weight, computed by `qfx.ops.packing`: alpha bounds
    the norm of the quantized w_n divided by |w_n|, and beta bounds the norm of its quantization
    error divided by |w_n|. `code`: how x is quantized, the fields of a `Code`. `factor` [K]:
    multiplies x before it is quantized.
    """
    how, k = Code(*code), x.shape[-1]
    qmin, qmax = code_range(how.bits, bool(how.symmetric))
    rows = x.reshape(x.shape[:-1].numel(), k).double()
    _, scale, _ = quantize(x, code, factor=factor)
    scales_mg = scale.reshape(len(rows), scale.shape[-1]).double()
    scales_mk = scales_mg.repeat_interleave(how.group or max(k, 1), 1)
    steps = scales_mk[:, :k].norm(dim=1) * (0.5 + (qmax - qmin) * 2.0**-21)  # (B1)
    alpha, beta = error.double()
    transformed = rows if factor is None else rows * factor
    size = rows.norm(dim=1)
    bound = (steps * alpha + transformed.norm(dim=1) * beta) / size
    return torch.where(size == 0, 0.0, bound)


@reference
def linear_guarded(
    x: Tensor,
    w: Tensor,
    weight: Tensor,
    layout: Sequence[int],
    error: Tensor,
    bias: Tensor | None,
    guard: float,
    site: str,
    code: Sequence[int],
    activation: str,
    out_dtype: torch.dtype,
    factor: Tensor | None = None,
) -> Tensor:
    """Computes linear_dynamic(x), but in float for rows whose bound (B5) is not at most `guard`: x
    [..., K], w [N, K] float -> out_dtype [..., N].

    `weight` (8 bits) and `error` are computed from w. `site`: the name of the matmul, under which
    the kernel counts rows; "" to count none.
    """
    y = linear_dynamic(x, weight, layout, bias, code, activation, out_dtype, factor)
    above = ~(relative_bound(x, error, code, factor) <= guard)
    if above.any():
        some = x.reshape(len(above), x.shape[-1])[above].to(y.dtype)
        bias = None if bias is None else bias.to(y.dtype)
        rows = activate(activation, F.linear(some, w.to(y.dtype), bias))
        y.view(len(above), w.shape[0])[above] = rows
    return y


linear_fake("linear_guarded")
no_gradient("linear_guarded")
