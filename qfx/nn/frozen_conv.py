"""A convolution with a quantized weight that does not train: the linear of its windows, under any
scheme, with gradients for its input and its bias. (C2) (T1)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qfx.graph.views import View, apply
from qfx.host.autograd import below_autograd, in_forward_mode
from qfx.nn.conv_like import ConvSettings, ConvViews
from qfx.nn.dtypes import output_dtype
from qfx.nn.frozen import Frozen, Prepared, linear
from qfx.ops.forms import DYNAMIC
from qfx.ops.registry import REFERENCES

ops = torch.ops.qfx
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of dimensions


def of_windows(
    x: Tensor, settings: ConvSettings, views: ConvViews, product: Callable[[Tensor], Tensor]
) -> Tensor:
    """Maps x [B, C, *sizes] or [C, *sizes] to what a convolution does, in the memory format of x.
    `product`: maps an image with its border to the products of windows and kernels [B, *q, N]."""
    if x.dim() == settings.axes + 1:
        return of_windows(x.unsqueeze(0), settings, views, product).squeeze(0)
    y = apply(views.windows.result, product(image_of(x, settings, views))).movedim(-1, 1)
    if not torch.compiler.is_compiling() and 0 in y.shape[2:]:
        raise ValueError(
            f"Conv: no window of {list(settings.kernel_size)} lies in the input, which has shape "
            f"{list(x.shape)}"
        )
    last = _LAST.get(y.dim(), torch.contiguous_format)
    if x.is_contiguous() or not x.is_contiguous(memory_format=last):
        return y.contiguous()
    return y.contiguous(memory_format=last)


def image_of(x: Tensor, settings: ConvSettings, views: ConvViews) -> Tensor:
    """Returns x [B, C, *sizes] or [C, *sizes] as a batch with the border that is added to it."""
    axes = settings.axes
    if x.dim() == axes + 1:
        x = x.unsqueeze(0)
    if x.dim() != axes + 2:
        raise ValueError(
            f"Conv: the input has shape {list(x.shape)}, expected {axes} axes after the channels, "
            "with or without a batch before them"
        )
    return F.pad(x, views.border, settings.padding_mode) if views.border else x


def rows_of(x: Tensor, view: View) -> Tensor:
    """Returns the windows of x [B, C, *sizes] as rows [B, *q, K]."""
    name, given = view[0]
    if name == "im2col" and x.is_cuda:  # which has no kernel there
        return REFERENCES["im2col"](x, *given)  # type: ignore[no-any-return]
    return apply(view, x)


def convolution(
    x: Tensor,
    bias: Tensor | None,
    frozen: Frozen,
    how: Prepared,
    view: View,
    window: tuple[Any, ...] | None,
) -> Tensor:
    """Maps x [B, C, *sizes] to [B, *q, N], in the dtype of x or of autocast: `linear` of the
    windows of x, bit for bit. Without gradients it is one operator, if there is one for the scheme.

    `view`, `window`: how the windows are read (`ConvViews`); `how`: as for `linear`."""
    if window is None or not _is_one_operator(x, bias, frozen, how):
        return linear(rows_of(x, view), bias, frozen, how)
    given = how.given
    arguments = (
        x, frozen.packed, given["layout"], bias, *window, given["code"], "none", output_dtype(x),
        frozen.factor,
    )  # fmt: skip
    if torch.compiler.is_compiling():
        return ops.conv_dynamic(*arguments)  # type: ignore[no-any-return]
    with below_autograd():
        return ops.conv_dynamic(*arguments)  # type: ignore[no-any-return]


def _is_one_operator(x: Tensor, bias: Tensor | None, frozen: Frozen, how: Prepared) -> bool:
    trains = x.requires_grad or (bias is not None and bias.requires_grad)
    if (torch.is_grad_enabled() and trains) or in_forward_mode() or x.is_cuda:
        return False
    turned = frozen.factor is not None or how.scheme.rotation != 0
    step, *more = how.steps[turned, False, False]
    return step.call is DYNAMIC and not more and frozen.shift is None
