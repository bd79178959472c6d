"""LSQConv: a convolution whose quantization steps are parameters, for quantization-aware
training."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from qfx.graph.views import apply
from qfx.nn.conv_like import ConvSettings, ConvViews, known_views, matrix_of, sized
from qfx.nn.conv_like import setting as _setting
from qfx.nn.frozen_conv import image_of, of_windows, rows_of
from qfx.nn.hook_transfer import check_convolution
from qfx.nn.learned_steps import LearnedSteps
from qfx.nn.linear_weight import as_leaf
from qfx.values.scheme import Scheme


class LSQConv(LearnedSteps):
    """A convolution of torch.nn in 1, 2 or 3 dimensions, transposed or not, in int8 with learned
    steps: the linear of its windows (C2), as `LSQLinear` computes it. (Q6) (T2)

        conv = qfx.nn.LSQConv(torch.nn.Conv2d(64, 128, 3, padding=1))

    Parameters: `weight` and `bias` are those of the float module, in their shapes. `w_log_step`:
    the logarithm of the weight's step, [N, 1] or [1, 1] depending on `scheme.w`. N is the number of
    output channels; a transposed convolution with a stride has one step for each of its phases and
    channels. `x_log_step` [1], if `scheme.x` is per tensor; otherwise each window has a dynamic
    scale.

    The output has the shape, dtype and memory format that those of `qfx.nn.Conv` have. While
    gradients are recorded, all windows are held in memory. Casts, eval mode and the state dict are
    as for `LSQLinear`. Raises ValueError for convolutions that `qfx.nn.Conv` refuses, and for
    schemes that `LSQLinear` refuses.
    """

    kind = "LSQConv"

    in_channels, out_channels = _setting("in_channels"), _setting("out_channels")
    kernel_size, stride = _setting("kernel_size"), _setting("stride")
    padding, padding_mode = _setting("padding"), _setting("padding_mode")
    dilation, transposed = _setting("dilation"), _setting("transposed")
    output_padding, groups = _setting("output_padding"), _setting("groups")

    def __init__(self, conv: nn.Module, scheme: Scheme | None = None) -> None:
        """Uses the settings and the parameters of `conv`, with a step that is fitted to its
        weight."""
        super().__init__()
        check_convolution(conv, "LSQConv")
        self.settings = ConvSettings.of(conv)
        self.views = known_views(self.settings)
        self._take(conv, scheme or Scheme(), False)
        self.train(conv.training)

    @classmethod
    def blank(cls) -> LSQConv:
        """Returns a module that no user has changed."""
        return cls(nn.Conv1d(1, 1, 1, device="meta", dtype=torch.float32))

    def _matrix(self) -> Tensor:
        return matrix_of(self.weight, self.views)

    def observe(self, x: Tensor) -> None:
        """Fits the step of activations to the windows of x [B, C, *sizes] or [C, *sizes] by the
        least mean square error."""
        if self.learns_activations:
            self._fit(torch.stack(self._rows(image_of(x, self.settings, self.views), self.views)))

    def forward(self, input: Tensor, output_size: Any = None) -> Tensor:
        """Maps [B, C, *sizes] or [C, *sizes] to what the float module does. `output_size`: of a
        transposed convolution, which it gives instead of `output_padding`."""
        if isinstance(input, fx.Proxy):
            return as_leaf(self, input)  # type: ignore[no-any-return]
        views = self.views
        if output_size is not None:
            views = known_views(sized(self.settings, input, output_size))
        return of_windows(input, self.settings, views, partial(self._of_image, views=views))

    def _of_image(self, image: Tensor, views: ConvViews) -> Tensor:
        bias = None if self.bias is None else apply(views.windows.bias, self.bias)
        return self._product(self._rows(image, views), bias)

    def _rows(self, image: Tensor, views: ConvViews) -> list[Tensor]:
        """Returns the windows of each group of channels as rows."""
        groups = image.chunk(self.groups, 1) if self.groups > 1 else [image]
        return [rows_of(part, views.windows.x) for part in groups]

    def extra_repr(self) -> str:
        parts = [str(self.settings)]
        parts += [] if self.bias is not None else ["bias=False"]
        return ", ".join([*parts, f"scheme={self.scheme}"])
