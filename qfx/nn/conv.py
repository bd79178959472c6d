"""Conv: a convolution whose weight is int8, for a model that is saved, loaded and served."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from qfx.graph.views import apply
from qfx.host.autograd import transforming
from qfx.host.subclasses import as_parameter
from qfx.nn.bias_warning import watch
from qfx.nn.conv_like import (
    ConvSettings,
    ConvViews,
    kernels_of,
    known_views,
    matrix_of,
    sized,
)
from qfx.nn.conv_like import setting as _setting
from qfx.nn.frozen_conv import convolution, grouped, groups_of, of_windows, parts, rows_of
from qfx.nn.frozen_state import FrozenState
from qfx.nn.hook_transfer import check_convolution
from qfx.nn.linear_weight import LinearWeight, as_leaf, named_scheme
from qfx.nn.quantized_weight import QuantizedWeight
from qfx.nn.weight_parts import weight_of
from qfx.values.scheme import Scheme
from qfx.values.site_recipe import SiteRecipe
from qfx.weights.memo import Memo


class Conv(LinearWeight):
    """A convolution of torch.nn in 1, 2 or 3 dimensions, transposed or not, with a weight that is
    given by int8 codes and does not train.

        conv = qfx.nn.Conv.from_float(torch.nn.Conv2d(64, 128, 3, padding=1), "w8a8")

    It computes the linear of its windows (C2): the parameter `weight` is a `QuantizedWeight` [N, K]
    as that of a `qfx.nn.Linear`, K = taps * channels of a group; `floats()` returns it in the shape
    of the float module. Each window is quantized as a row of a linear is. The output has the shape
    and the dtype that the float module's has, and the memory format of the input: channels last is
    faster, because no output is rearranged. The input and the bias get gradients (T1).

    The attributes of the float module (`kernel_size`, `stride`, ...) are kept and cannot be
    changed. State dicts are those of `qfx.nn.Linear`; a float `weight` in the shape of the float
    module is quantized when it is loaded.
    """

    in_channels, out_channels = _setting("in_channels"), _setting("out_channels")
    kernel_size, stride = _setting("kernel_size"), _setting("stride")
    padding, padding_mode = _setting("padding"), _setting("padding_mode")
    dilation, transposed = _setting("dilation"), _setting("transposed")
    output_padding, groups = _setting("output_padding"), _setting("groups")

    def __init__(self, conv: nn.Module, weight: QuantizedWeight) -> None:
        """Uses the settings and the bias of `conv`. `weight` [N, K]: its kernels, quantized."""
        super().__init__()
        self.settings = ConvSettings.of(conv)
        self.views = known_views(self.settings)
        self.out_features, self.in_features = weight.shape
        self._memo = Memo()  # of the groups' weights
        self.weight = as_parameter(weight)
        self.register_parameter("bias", conv.bias)  # type: ignore[arg-type]
        watch(self)
        self.train(conv.training)

    @classmethod
    def from_float(  # type: ignore[override]
        cls, conv: nn.Module, scheme: Scheme | SiteRecipe | str | None = None
    ) -> Conv:
        """Quantizes the weight of a convolution of torch.nn and uses the same bias parameter.

        `scheme`: as for `qfx.nn.Linear.from_float`. Raises ValueError for groups of channels with
        fewer than 8 outputs and for transposed groups, for convolutions that are no linear of
        windows, and in the cases in which that function does.
        """
        check_convolution(conv, "Conv")
        weight: Any = conv.weight
        settings = ConvSettings.of(conv)
        views = known_views(settings)
        matrix = matrix_of(weight.detach(), views)
        of_pixel = settings.in_channels // settings.groups
        several = views.windows.x[0][0] == "im2col" and matrix.shape[1] != of_pixel
        channels = of_pixel if several else None
        return cls(conv, QuantizedWeight.of(matrix, named_scheme(scheme), channels))

    @classmethod
    def from_state(cls, conv: nn.Module, found: FrozenState) -> Conv:
        """Implements `StoredModule.from_state`."""
        settings = ConvSettings.of(conv)
        weight: Any = conv.weight
        like = torch.empty(settings.weight_shape, dtype=weight.dtype, device="meta")
        n, k = matrix_of(like, known_views(settings)).shape
        tensors = {name: tensor.detach() for name, tensor in found.tensors.items()}
        return cls(conv, weight_of(found._replace(tensors=tensors), n, k, weight.dtype))

    @property
    def float_numel(self) -> int:
        """The number of elements of the weight of the float module."""
        return int(torch.Size(self.settings.weight_shape).numel())

    def floats(self, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the dequantized weight in the shape of the float module, in the dtype of the
        weight or in `dtype`. A transposed convolution with a kernel that its stride does not divide
        also multiplies by the small errors of taps that are zero in float."""
        matrix = self.quantized.dequantize(dtype)
        return kernels_of(matrix, self.views.windows.weight, self.settings.weight_shape)

    def forward(self, input: Tensor, output_size: Any = None) -> Tensor:
        """Maps [B, C, *sizes] or [C, *sizes] to what the float module does. `output_size`: of a
        transposed convolution, which it gives instead of `output_padding`."""
        if isinstance(input, fx.Proxy):
            return as_leaf(self, input)  # type: ignore[no-any-return]
        views = self.views
        if output_size is not None:
            views = known_views(sized(self.settings, input, output_size))
        return of_windows(input, self.settings, views, partial(self._product, views=views))

    def _product(self, x: Tensor, views: ConvViews) -> Tensor:
        """Returns the products of the windows and the kernels [B, *q, N]."""
        weight: Any = self._parameters.get("weight")
        bias = None if self.bias is None else apply(views.windows.bias, self.bias)
        if type(weight) is not QuantizedWeight or transforming():
            any_weight = self.weight
            matrix = any_weight if any_weight.dim() == 2 else self._matrix_of(any_weight)
            each = zip(*parts(x, matrix, bias, self.groups), strict=True)
            products = [F.linear(rows_of(x, views.windows.x), w, b) for x, w, b in each]
            return torch.cat(products, -1) if self.groups > 1 else products[0]
        if self.groups > 1:
            held = tuple(t for t in weight.frozen if t is not None)
            groups = self._memo.get(held, lambda: groups_of(weight, self.groups))
            return grouped(x, bias, groups, views.windows.x, views.window)
        return convolution(x, bias, weight.frozen, weight.how, views.windows.x, views.window)

    def _float_shape(self) -> tuple[int, ...]:
        return self.settings.weight_shape

    def _matrix_of(self, weight: Tensor) -> Tensor:
        return matrix_of(weight, self.views)

    def extra_repr(self) -> str:
        weight, parts = self._codes_here(), [str(self.settings)]
        parts += [] if self.bias is not None else ["bias=False"]
        parts += [f"scheme={weight.scheme}"] if weight is not None else []
        return ", ".join(parts)
