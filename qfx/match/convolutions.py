"""Convolutions as matmuls: of windows by kernels, and transposed ones of windows by the phases of
their kernels.

A window that overlaps its neighbours, or that lies partly outside of the image, is read by the
operator `im2col`; others are views of the image.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from qfx.graph.capture import value
from qfx.graph.views import Step
from qfx.graph.windows import (
    WindowSetting,
    each_axis,
    padding_of,
    transposed_views,
    window_views,
)
from qfx.match.contractions import Operands, as_recorded

CONVOLUTION_NAMES = ("x", "w", "bias", "stride", "padding", "dilation", "groups")
ATEN_CONVOLUTION_NAMES = (*CONVOLUTION_NAMES[:-1], "transposed", "output_padding", "groups")
TRANSPOSED_NAMES = (*CONVOLUTION_NAMES[:-2], "output_padding", "groups", "dilation")
FUNCTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
TRANSPOSED_FUNCTIONS = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
_LAST: Step = ("movedim", (-1, 1))


def convolution(node: fx.Node, a: dict[str, Any]) -> Operands | str:
    """Parses a convolution: the matmul of its windows by its kernels."""
    setting = _setting(a)
    if isinstance(setting, str):
        return setting
    groups = a.get("groups", 1)
    if groups != 1 and a.get("transposed"):
        return f"a transposed convolution in {groups} groups"
    if a.get("transposed"):
        return _transposed(node, a, setting)
    views = window_views(setting, groups)
    back = as_recorded(node, _LAST)
    return Operands(a["x"], a["w"], views.weight, a.get("bias"), views.x, back, groups=groups)


def transposed(node: fx.Node, a: dict[str, Any]) -> Operands | str:
    """Parses a transposed convolution."""
    return convolution(node, {**a, "transposed": True})


def _setting(a: dict[str, Any]) -> WindowSetting | str:
    """Returns the settings of a convolution, or the reason why they are no numbers."""
    x, weight = value(a["x"]), value(a["w"])
    shape, rank = getattr(weight, "shape", None), getattr(x, "ndim", None)
    if shape is None or rank != len(shape):
        return "a convolution of unknown or unbatched shapes"
    kernel = tuple(int(size) for size in shape[2:])
    count = len(kernel)
    stride, dilation, more = (
        each_axis(a.get(name, default), count)
        for name, default in (("stride", 1), ("dilation", 1), ("output_padding", 0))
    )
    padding = padding_of(a.get("padding", 0), kernel, dilation)
    if any(isinstance(n, fx.Node) for each in (stride, dilation, more, *padding) for n in each):
        return "a convolution whose stride, padding or dilation is computed"
    return WindowSetting(kernel, stride, padding, dilation, more)


def _transposed(node: fx.Node, a: dict[str, Any], setting: WindowSetting) -> Operands | str:
    """Parses a transposed convolution."""
    views = transposed_views(setting)
    if isinstance(views, str):
        return views
    steps = views.result
    if steps and steps[-1][0] == "slice" and not as_recorded(node)[:1]:
        steps = (*steps, ("contiguous", ()))  # channels last, as the result was
    back = as_recorded(node, *steps, _LAST)
    return Operands(
        a["x"], a["w"], views.weight, a.get("bias"), views.x, back, bias_view=views.bias
    )
