"""A convolution with a quantized weight that does not train: the linear of its windows, under any
scheme, with gradients for its input and its bias. (C2) (T1)"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qfx.graph.views import View, apply
from qfx.host.autograd import below_autograd, in_forward_mode
from qfx.nn.conv_like import ConvSettings, ConvViews
from qfx.nn.dtypes import output_dtype
from qfx.nn.frozen import Frozen, Prepared, cut, linear
from qfx.nn.quantized_weight import QuantizedWeight
from qfx.ops.forms import DYNAMIC
from qfx.ops.layout import layout_of
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


class Groups(NamedTuple):
    """The weights of groups of channels: each by itself, as a stack [G, bytes] for the operator,
    and how a group is computed."""

    each: list[Frozen]
    stack: Frozen
    how: Prepared


def groups_of(weight: QuantizedWeight, count: int) -> Groups:
    """Cuts a weight [N, K] into those of `count` groups, N / count rows each."""
    (n, k), scheme = weight.shape, weight.scheme
    rows = n // count
    found = (
        cut(weight.frozen, scheme, (n, k), (at, at + rows), (0, k)) for at in range(0, n, rows)
    )
    each = [frozen for frozen in found if frozen is not None]  # whole rows can always be cut
    stack = each[0]._replace(packed=torch.stack([frozen.packed for frozen in each]))
    layout = layout_of(scheme.w, scheme.group, rows)
    return Groups(each, stack, weight.how._replace(given={**weight.how.given, "layout": layout}))


def grouped(
    x: Tensor, bias: Tensor | None, groups: Groups, view: View, window: tuple[Any, ...] | None
) -> Tensor:
    """Maps x [B, C, *sizes] to [B, *q, N] like `convolution`, group by group of the channels or in
    one operator, bit for bit."""
    if window is not None and _is_one_operator(x, bias, groups.stack, groups.how):
        return convolution(x, bias, groups.stack, groups.how, view, window)
    count = len(groups.each)
    biases = [None] * count if bias is None else bias.chunk(count)
    each = zip(x.chunk(count, 1), biases, groups.each, strict=True)
    return torch.cat([linear(rows_of(x, view), b, part, groups.how) for x, b, part in each], -1)


def parts(
    x: Tensor, matrix: Tensor, bias: Tensor | None, count: int
) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor | None]]:
    """Returns the channels of x [B, C, *sizes], the rows of `matrix` [N, K] and the elements of the
    bias of each of `count` groups."""
    if count == 1:
        return [x], [matrix], [bias]
    biases = [None] * count if bias is None else bias.chunk(count)
    weights: Any = matrix.chunk(count)
    if isinstance(matrix, QuantizedWeight):  # of which a copy of some rows is a weight again
        weights = [rows.clone() for rows in weights]
    return x.chunk(count, 1), weights, biases


def _is_one_operator(x: Tensor, bias: Tensor | None, frozen: Frozen, how: Prepared) -> bool:
    trains = x.requires_grad or (bias is not None and bias.requires_grad)
    if (torch.is_grad_enabled() and trains) or in_forward_mode() or x.is_cuda:
        return False
    turned = frozen.factor is not None or how.scheme.rotation != 0
    step, *more = how.steps[turned, False, False]
    return step.call is DYNAMIC and not more and frozen.shift is None
