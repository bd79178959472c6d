"""Convolutions of torch.nn and images for them, as hypothesis draws them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

PLAIN = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of dimensions


class Convolution(NamedTuple):
    """A convolution, and an input of it."""

    module: Any
    x: Tensor


def laid_out(x: Tensor, last: bool) -> Tensor:
    """x, channels last if `last` and if there is such a format for it."""
    wanted = FORMATS.get(x.dim())
    return x.contiguous(memory_format=wanted) if last and wanted is not None else x


@st.composite
def convolutions(draw: Any, transposed: bool | None = None) -> Convolution:
    """Draws a convolution with whole numbers as weights and an image of whole numbers, so that
    sums in float32 are exact."""
    axes = draw(st.integers(1, 3))
    turned = draw(st.booleans()) if transposed is None else transposed
    each = lambda *of: tuple(draw(st.sampled_from(of)) for _ in range(axes))  # noqa: E731
    channels, outputs = draw(st.sampled_from((1, 3, 8, 16))), draw(st.sampled_from((1, 4, 9)))
    kernel, stride, padding = each(1, 2, 3), each(1, 2, 3), each(0, 1, 2)
    padding = tuple(min(p, k - 1) for p, k in zip(padding, kernel, strict=True))
    settings: dict[str, Any] = {"stride": stride, "padding": padding, "bias": draw(st.booleans())}
    if turned:
        more = each(0, 1, 2)
        fits = tuple(min(n, s - 1) for n, s in zip(more, stride, strict=True))
        module = TRANSPOSED[axes - 1](channels, outputs, kernel, output_padding=fits, **settings)
    else:
        settings["padding_mode"] = draw(st.sampled_from(("zeros", "reflect", "circular")))
        settings["dilation"] = each(1, 2)
        if draw(st.booleans()):
            settings |= {"padding": "same", "stride": (1,) * axes}
        module = PLAIN[axes - 1](channels, outputs, kernel, **settings)
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    for parameter in module.parameters():
        parameter.data = torch.randint(-9, 9, parameter.shape, generator=g).float()
    batch, sizes = draw(st.sampled_from((1, 3))), each(6, 7, 10)
    x = torch.randint(-9, 9, (batch, channels, *sizes), generator=g).float()
    return Convolution(module, laid_out(x, draw(st.booleans())))
