"""Depthwise convolutions with packed weights: conv_depthwise. This module contains its reference
and its fake implementation. See docs/numerics.md (C5)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from qfx.graph.activations import activate
from qfx.ops.convolution import Sizes, outputs_of
from qfx.ops.layout import Layout
from qfx.ops.quantize import quantize
from qfx.ops.registry import fake, no_gradient, reference
from qfx.ops.weight import unpack_weight

QUAD = 4  # taps of a line that are stored together


def stored_taps(taps: int) -> int:
    """Returns how many taps of each line of a kernel the packed weight has, the last ones zero."""
    return -(-taps // QUAD) * QUAD


@reference
def conv_depthwise(
    x: Tensor,
    weight: Tensor,
    layout: Sequence[int],
    bias: Tensor | None,
    kernel: Sizes,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    code: Sequence[int],
    activation: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """Convolves each channel with a kernel of its own: x [B, C, *sizes] float -> out_dtype [B,
    *outputs, C]. (C5)

    There are one or two axes, the last one without dilation. Each channel of an image is quantized
    as a row by `code`, which has no groups and no rotation. `weight` is packed from [C, lines *
    stored_taps], the taps of a line followed by zeros. `padding`: the zeros before and after each
    axis, two numbers for each.
    """
    lines, taps = kernel[0] if len(kernel) == 2 else 1, kernel[-1]
    q, scale, zero_point = quantize(x.flatten(2), code)
    fields = Layout(*layout)
    w, w_scale, *_ = unpack_weight(weight, fields, lines * stored_taps(taps))
    shifted = (q.long() - zero_point.reshape(*q.shape[:2], 1)).reshape(x.shape).double()
    kernels = w.unflatten(1, (lines, -1))[..., :taps].double()
    if len(kernel) == 1:
        kernels = kernels[:, 0]
    outputs = outputs_of(x.shape[2:], kernel, stride, padding, dilation)
    around = [n for i in reversed(range(len(kernel))) for n in padding[2 * i : 2 * i + 2]]
    convolve = F.conv2d if len(kernel) == 2 else F.conv1d
    if 0 in (*outputs, x.shape[0], x.shape[1]):
        sums = shifted.new_zeros((*x.shape[:2], *outputs))
    else:
        given = (kernels.unsqueeze(1), None, tuple(stride), 0, tuple(dilation), x.shape[1])
        sums = convolve(F.pad(shifted, around), *given)  # type: ignore[arg-type]
    ones = (1,) * len(kernel)
    scales = scale.reshape(*q.shape[:2], *ones) * w_scale.reshape(1, -1, *ones)
    y = (sums.float() * scales).movedim(1, -1)
    y = y if bias is None else y + bias.float()
    return activate(activation, y).to(out_dtype).contiguous()


@fake("conv_depthwise")
def _(
    x: Tensor,
    weight: Tensor,
    layout: Sequence[int],
    bias: Tensor | None,
    kernel: Sizes,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    code: Sequence[int],
    activation: str,
    out_dtype: torch.dtype,
) -> Tensor:
    outputs = outputs_of(x.shape[2:], kernel, stride, padding, dilation)
    return x.new_empty((x.shape[0], *outputs, x.shape[1]), dtype=out_dtype)


no_gradient("conv_depthwise")
