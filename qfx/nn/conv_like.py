"""Recognizes the convolutions that `qfx.nn.Conv` replaces, and describes each as the linear of its
windows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from qfx.graph.views import View, apply
from qfx.graph.windows import (
    WindowSetting,
    WindowViews,
    each_axis,
    padding_of,
    transposed_views,
    window_views,
)
from qfx.values.limits import FEWEST_OUTPUTS, unserved_type

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
CONVOLUTIONS += (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)  # type: ignore

_FUNCTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}  # by the number of axes
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def is_convolution(module: nn.Module) -> bool:
    """Whether `module` is exactly a convolution of torch.nn, not of a subclass."""
    return type(module) in CONVOLUTIONS


class ConvSettings(NamedTuple):
    """The settings of a convolution, by the names that the attributes of torch.nn have."""

    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    padding_mode: str
    groups: int = 1

    @classmethod
    def of(cls, conv: Any) -> ConvSettings:
        """Returns the settings of a convolution of torch.nn."""
        ins, outs, *kernel = conv.weight.shape  # attributes may be older than the weight
        if not conv.transposed:
            ins, outs = outs * conv.groups, ins
        axes = len(kernel)
        padding = conv.padding if isinstance(conv.padding, str) else each_axis(conv.padding, axes)
        stride, dilation, more = (
            each_axis(given, axes) for given in (conv.stride, conv.dilation, conv.output_padding)
        )
        return cls(
            ins, outs, tuple(kernel), stride, padding, dilation, conv.transposed, more,
            conv.padding_mode, conv.groups,
        )  # fmt: skip

    @property
    def axes(self) -> int:
        """The number of axes of an image, 1 to 3."""
        return len(self.kernel_size)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape of the weight of the float module."""
        channels = (self.out_channels, self.in_channels // self.groups)
        return (*(channels[::-1] if self.transposed else channels), *self.kernel_size)

    def __str__(self) -> str:
        parts = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"]
        parts += [f"stride={self.stride}, padding={self.padding!r}"]
        parts += [f"dilation={self.dilation}"] if any(d != 1 for d in self.dilation) else []
        parts += [f"groups={self.groups}"] if self.groups > 1 else []
        parts += [f"padding_mode={self.padding_mode}"] if self.padding_mode != "zeros" else []
        if self.transposed:
            parts += [f"transposed=True, output_padding={self.output_padding}"]
        return ", ".join(parts)


def setting(name: str) -> Any:
    """Returns a property that reads one of the `settings` of a module."""
    return property(lambda conv: getattr(conv.settings, name), doc="As of the float convolution.")


def float_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, settings: ConvSettings
) -> Tensor:
    """Returns the convolution of x that the module of torch.nn with these settings computes."""
    stride, padding, dilation = settings.stride, settings.padding, settings.dilation
    if settings.transposed:
        more = settings.output_padding
        turned = _TRANSPOSED[settings.axes]
        return turned(x, weight, bias, stride, padding, more, 1, dilation)  # type: ignore
    if border := views_of(settings).border:  # type: ignore[union-attr]
        x, padding = F.pad(x, border, settings.padding_mode), 0  # type: ignore[assignment]
    plain = _FUNCTIONS[settings.axes]
    return plain(x, weight, bias, stride, padding, dilation, settings.groups)  # type: ignore


def sized(settings: ConvSettings, x: Tensor, output_size: Any) -> ConvSettings:
    """Returns the settings with which a transposed convolution of x has an output of this size.
    Raises ValueError if there are none."""
    if not settings.transposed:
        raise ValueError("Conv: only a transposed convolution has an output_size")
    wanted, padding = tuple(output_size)[-settings.axes :], tuple(settings.padding)
    strides, sizes = settings.stride, x.shape[-settings.axes :]
    each = zip(sizes, settings.kernel_size, strides, padding, settings.dilation, strict=True)
    least = [(n - 1) * s - 2 * p + d * (k - 1) + 1 for n, k, s, p, d in each]  # type: ignore
    more = tuple(size - n for size, n in zip(wanted, least, strict=True))
    if any(not 0 <= m < s for m, s in zip(more, strides, strict=True)):
        most = [n + s - 1 for n, s in zip(least, strides, strict=True)]
        raise ValueError(
            f"Conv: output_size is {list(wanted)}, expected sizes from {least} to {most}"
        )
    return settings._replace(output_padding=more)


class ConvViews(NamedTuple):
    """A convolution as a linear of windows. `border`: the elements that are added around an image
    first, as F.pad takes them, none where these are zeros. `window`: the arguments with which
    `im2col` reads the rows; None where rows have the channels before the taps. `windows`: all
    views."""

    border: tuple[int, ...]
    window: tuple[Any, ...] | None
    windows: WindowViews


def views_of(settings: ConvSettings) -> ConvViews | str:
    """Returns the views of a convolution, or the reason why it is no linear of windows."""
    kernel, dilation = settings.kernel_size, settings.dilation
    padding = padding_of(settings.padding, kernel, dilation)
    windows = WindowSetting(kernel, settings.stride, padding, dilation, settings.output_padding)
    border: tuple[int, ...] = ()
    if settings.padding_mode != "zeros":
        border = tuple(n for side in reversed(padding) for n in side)
        windows = replace(windows, padding=((0, 0),) * settings.axes)
    views: WindowViews | str
    if settings.transposed:
        views = transposed_views(windows)
    else:
        views = window_views(windows, settings.groups)
    if isinstance(views, str):
        return views
    if views.x[0][0] == "im2col":
        return ConvViews(border, views.x[0][1], views)
    pixels = math.prod(kernel) == 1
    none = (0,) * (2 * settings.axes)
    window = (kernel, settings.stride, none, (1,) * settings.axes) if pixels else None
    return ConvViews(border, window, views)


def known_views(settings: ConvSettings) -> ConvViews:
    """Returns the views of a convolution that is a linear of windows."""
    views = views_of(settings)
    assert isinstance(views, ConvViews), views
    return views


def why_no_windows(conv: Any) -> str:
    """Returns why a convolution of torch.nn stays float; '' if `qfx.nn.Conv` can replace it. Reads
    its settings and not its values."""
    if conv.groups != 1 and (why := _why_groups(conv)):
        return why
    views = _views_of_module(conv)
    return views if isinstance(views, str) else ""


def _views_of_module(conv: Any) -> ConvViews | str | None:
    """Returns the views of a convolution, or the reason why there are none; None if its weight is
    not there, has another number of dimensions, or is of a type that int8 does not support."""
    weight = conv._parameters.get("weight")
    if weight is None or is_lazy(weight) or unserved_type(weight):
        return None
    if weight.dim() != 2 + len(conv.kernel_size):
        return None
    return views_of(ConvSettings.of(conv))


def _why_groups(conv: Any) -> str:
    """Returns why a convolution of several groups of channels stays float; '' if it does not."""
    if conv.in_channels == conv.groups:
        return "a depthwise convolution: each output reads one channel"
    if conv.transposed:
        return f"a transposed convolution of {conv.groups} groups of channels"
    outputs = conv.out_channels // conv.groups
    if outputs >= FEWEST_OUTPUTS:
        return ""
    return (
        f"a convolution of {conv.groups} groups of channels with {outputs} outputs each, fewer "
        f"than {FEWEST_OUTPUTS}, which a kernel computes side by side"
    )


def conv_sizes(conv: Any) -> tuple[int, int]:
    """Returns K and N of the linear of the windows of a convolution of torch.nn. One that is no
    such linear has those of its kernels."""
    views = None if why_no_windows(conv) else _views_of_module(conv)
    if not isinstance(views, ConvViews):
        return conv.in_channels // conv.groups * math.prod(conv.kernel_size), conv.out_channels
    n, k = matrix_of(conv.weight.to("meta"), views).shape
    return k, n


def matrix_of(weight: Tensor, views: ConvViews) -> Tensor:
    """Returns the kernels of a convolution as a matrix [N, K]."""
    return apply(views.windows.weight, weight)


def kernels_of(matrix: Tensor, view: View, shape: tuple[int, ...]) -> Tensor:
    """Returns the kernels of this shape whose matrix, by `view`, is `matrix`: the inverse of
    `matrix_of`."""
    count = math.prod(shape)
    places = torch.arange(1, count + 1, dtype=torch.int64, device=matrix.device)
    index = apply(view, places.reshape(shape)).flatten()  # 0 where the view adds zeros
    flat = matrix.new_zeros(count + 1)
    flat[index] = matrix.flatten()
    return flat[1:].reshape(shape)
