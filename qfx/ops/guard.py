"""int8_linear_guarded and int8_linear_groups_guarded: references, fakes, gradients; the bound (B5)
that they decide by."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from qfx.ops.activations import activate
from qfx.ops.groups import int8_linear_groups_dynamic, quantize_groups
from qfx.ops.linear import int8_linear_dynamic
from qfx.ops.quantize import code_range, quantize
from qfx.ops.registry import linear_fake, no_gradient, reference


def relative_bound(
    x: Tensor,
    error: Tensor,
    axes: Sequence[int],
    bits: int,
    symmetric: bool,
    factor: Tensor | None = None,
    rotation: int = 0,
    group: int = 0,
) -> Tensor:
    """g_m for each row of x [..., K], float64 [M]: what int8 may be off by, |x_m| |w_n| being 1.

    `error` float32 [2]: alpha and beta of the weight, as `qfx.ops.packing` makes them. (B5)
    """
    k, (qmin, qmax) = x.shape[-1], code_range(bits, symmetric)
    rows = x.reshape(x.shape[:-1].numel(), k).double()
    if group:
        _, scale, _ = quantize_groups(x, group, bits, symmetric, factor, rotation)
    else:
        _, scale, _ = quantize(x, axes, bits, symmetric, factor, rotation)
    scales_mk = (
        scale.reshape(len(rows), scale.shape[-1]).double().repeat_interleave(group or max(k, 1), 1)
    )
    steps = scales_mk[:, :k].norm(dim=1) * (0.5 + (qmax - qmin) * 2.0**-21)  # (B1)
    alpha, beta = error.double()
    transformed = rows if factor is None else rows * factor
    size = rows.norm(dim=1)
    bound = (steps * alpha + transformed.norm(dim=1) * beta) / size
    return torch.where(size == 0, 0.0, bound)


@reference
def int8_linear_guarded(
    x: Tensor,
    w: Tensor,
    packed: Tensor,
    w_scale: Tensor,
    error: Tensor,
    bias: Tensor | None,
    guard: float,
    site: str,
    axes: Sequence[int],
    bits: int,
    symmetric: bool,
    activation: str,
    out_dtype: torch.dtype,
    factor: Tensor | None = None,
    rotation: int = 0,
) -> Tensor:
    """int8_linear_dynamic(x), but rows whose bound (B5) is not at most `guard` are those of the
    float linear: x [..., K], w [N, K] float -> out_dtype [..., N].

    `packed`, `w_scale`, `error`: of w. `site`: the name under which the kernel counts, "" for none.
    """
    how = (axes, bits, symmetric)
    transform = (factor, rotation)
    y = int8_linear_dynamic(x, packed, w_scale, bias, *how, activation, out_dtype, *transform)
    above = ~(relative_bound(x, error, *how, *transform) <= guard)
    return _in_float(y, above, x, w, bias, activation)


def _in_float(
    y: Tensor, above: Tensor, x: Tensor, w: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    """y, but the rows `above` [M] are those of the float linear."""
    if above.any():
        some = x.reshape(len(above), x.shape[-1])[above].to(y.dtype)
        bias = None if bias is None else bias.to(y.dtype)
        rows = activate(activation, F.linear(some, w.to(y.dtype), bias))
        y.view(len(above), w.shape[0])[above] = rows
    return y


linear_fake("int8_linear_guarded")


@reference
def int8_linear_groups_guarded(
    x: Tensor,
    w: Tensor,
    packed: Tensor,
    w_scale: Tensor,
    w_zero: Tensor | None,
    error: Tensor,
    bias: Tensor | None,
    guard: float,
    site: str,
    axes: Sequence[int],
    group: int,
    bits: int,
    symmetric: bool,
    activation: str,
    out_dtype: torch.dtype,
    factor: Tensor | None = None,
    rotation: int = 0,
) -> Tensor:
    """int8_linear_groups_dynamic(x), guarded as int8_linear_guarded is: x [..., K], w [N, K] float
    -> out_dtype [..., N]."""
    how = (bits, symmetric)
    y = int8_linear_groups_dynamic(
        x, packed, w_scale, w_zero, bias, axes, group, *how, activation, out_dtype, factor, rotation
    )
    above = ~(relative_bound(x, error, axes, *how, factor, rotation, group) <= guard)
    return _in_float(y, above, x, w, bias, activation)


linear_fake("int8_linear_groups_guarded")


no_gradient("int8_linear_guarded")
no_gradient("int8_linear_groups_guarded")
