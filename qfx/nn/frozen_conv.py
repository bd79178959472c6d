"""A convolution with a quantized weight that does not train: the linear of its windows, under any
scheme, with gradients for its input and its bias. (C2) (T1)"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qfx.graph.views import View, apply
from qfx.host.autograd import below_autograd, in_forward_mode
from qfx.nn.dtypes import output_dtype
from qfx.nn.frozen import Frozen, Prepared, linear
from qfx.ops.forms import DYNAMIC
from qfx.ops.registry import REFERENCES

ops = torch.ops.qfx


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
