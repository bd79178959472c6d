"""im2col and conv_dynamic: a convolution is the linear of its windows, bit for bit, and the order
of a row is that of PyTorch's convolution."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import qfx._C as _C
from qfx.graph.activations import activate
from qfx.ops.code import Code
from qfx.ops.convolution import outputs_of
from qfx.ops.registry import REFERENCES
from tests.conftest import on_isa, on_threads, same_bits
from tests.lib.several import Weights

ops = torch.ops.qfx
F32 = torch.float32
CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


class Image(NamedTuple):
    """An image, and the windows in it."""

    x: Tensor
    kernel: list[int]
    stride: list[int]
    padding: list[int]
    dilation: list[int]

    @property
    def k(self) -> int:
        return math.prod(self.kernel) * self.x.shape[1]

    def rows(self) -> Tensor:
        rows: Tensor = REFERENCES["im2col"](*self)
        return rows

    def part(self, group: int, groups: int) -> Image:
        return self._replace(x=self.x.chunk(groups, 1)[group])


def laid_out(x: Tensor, layout: str) -> Tensor:
    """Returns x in another layout: channels last, or with its first and last axis exchanged."""
    if layout == "channels last":
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    return x.transpose(1, -1).contiguous().transpose(1, -1) if layout == "exchanged" else x


@st.composite
def images(draw: Any) -> Image:
    """Draws images of all layouts: of one pixel, empty batches, windows larger than the image."""
    axes = draw(st.integers(1, 3))
    channels = draw(st.sampled_from((1, 3, 8, 16, 24, 64) if axes < 3 else (1, 5, 16)))
    sizes = [
        draw(st.sampled_from((1, 2, 5, 9, 140) if axes == 1 else (1, 2, 5, 9))) for _ in range(axes)
    ]
    each = lambda *of: [draw(st.sampled_from(of)) for _ in range(axes)]  # noqa: E731
    padding = [draw(st.integers(0, 3)) for _ in range(2 * axes)]
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    x = torch.randn(draw(st.sampled_from((1, 2, 0))), channels, *sizes, generator=g)
    x = x.to(draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16))))
    x = laid_out(x, draw(st.sampled_from(("contiguous", "channels last", "exchanged"))))
    return Image(x, each(1, 2, 3, 5), each(1, 1, 2, 3), padding, each(1, 1, 2, 3))


@given(images())
def test_rows_are_windows(image: Image) -> None:
    rows = ops.im2col.default(*image)
    assert same_bits(rows, image.rows()) and rows.is_contiguous()


@given(
    images(), st.sampled_from((1, 5, 33)), st.sampled_from((0, 16, 64)), st.booleans(), st.data()
)
def test_a_convolution_is_the_linear_of_its_windows(
    image: Image, n: int, rotation: int, symmetric: bool, data: Any
) -> None:
    """On every instruction set, on one and on several threads; windows with a NaN or an infinity
    have their own result, and their neighbours do not notice."""
    special = data.draw(st.sampled_from((1.0, -0.0, math.nan, -math.inf, 6e4)), label="special")
    image = image._replace(x=image.x.clone())
    image.x[..., :1] *= special
    code = list(Code(symmetric=int(symmetric), rotation=rotation))
    code[2] = data.draw(st.integers(0, 1), label="one scale for all rows")
    packed, layout = Weights(n, image.k).int8(n)[:2]
    bias = torch.randn(n, generator=torch.Generator().manual_seed(n))
    end = (code, "relu", F32)
    wanted = ops.linear_dynamic.default(image.rows(), packed, layout, bias, *end)
    for isa in _C.isas():
        with on_isa(isa), on_threads(data.draw(st.sampled_from((1, 3)))):
            y = ops.conv_dynamic.default(image.x, packed, layout, bias, *image[1:], *end)
        assert same_bits(y, wanted), isa


@given(images(), st.integers(2, 3))
def test_groups_are_convolutions_of_their_channels(image: Image, groups: int) -> None:
    image = image._replace(x=torch.cat([image.x] * groups, 1))
    of, code = Weights(1, image.k // groups), [8, 1, 0, 0, 0]
    each = [of.int8(5) for _ in range(groups)]
    bias = torch.randn(5 * groups, generator=torch.Generator().manual_seed(0))
    y = ops.conv_dynamic.default(
        image.x, torch.stack([w.packed for w in each]), each[0].layout, bias, *image[1:], code,
        "none", F32,
    )  # fmt: skip
    for g, (w, some) in enumerate(zip(each, bias.chunk(groups), strict=True)):
        own = image.part(g, groups)
        alone = ops.conv_dynamic.default(
            own.x, w.packed, w.layout, some, *own[1:], code, "none", F32
        )
        assert same_bits(y[..., 5 * g : 5 * g + 5], alone)


@given(
    images(), st.sampled_from((1, 5, 33)), st.sampled_from(("none", "relu", "silu")),
    st.sampled_from((F32, torch.bfloat16, torch.float16)), st.booleans(), st.integers(1, 2),
)  # fmt: skip
def test_a_residual_is_added_before_the_activation(
    image: Image, n: int, activation: str, dtype: torch.dtype, by_groups: bool, groups: int
) -> None:
    """In float32, on every instruction set, however it lies in memory. (E5)"""
    image = image._replace(x=torch.cat([image.x] * groups, 1))
    of, code = Weights(n, image.k // groups), [8, 0, 0, 0, 0]
    each = [of.in_groups(n, 32, "minimum") if by_groups else of.int8(n) for _ in range(groups)]
    packed = torch.stack([w.packed for w in each]) if groups > 1 else each[0].packed
    call = (image.x, packed, each[0].layout, torch.ones(groups * n), *image[1:], code)
    sums = ops.conv_dynamic.default(*call, "none", F32)
    g = torch.Generator().manual_seed(n)
    residual = torch.randn(sums.transpose(1, -1).shape, generator=g).to(dtype).transpose(1, -1)
    wanted = activate(activation, sums + residual.float()).to(dtype)
    for isa in _C.isas():
        with on_isa(isa):
            y = ops.conv_dynamic.default(*call, activation, dtype, None, residual)
        torch.testing.assert_close(y, wanted, rtol=_RTOL[dtype], atol=1e-6)
        assert activation == "silu" or same_bits(y, wanted), isa


_RTOL = {F32: 2**-21, torch.bfloat16: 2**-8, torch.float16: 2**-10}


@given(images())
def test_sums_are_those_of_a_convolution_of_codes(image: Image) -> None:
    """Integers below 2^24 are exact in float32: rows and K have the order that the weight has."""
    axes = len(image.kernel)
    codes = (image.x.float() * 8).round().clamp(-30, 30)
    g = torch.Generator().manual_seed(0)
    w = torch.randint(-8, 8, (3, image.x.shape[1], *image.kernel), generator=g).float()
    around = [n for i in reversed(range(axes)) for n in image.padding[2 * i : 2 * i + 2]]
    if 0 in outputs_of(image.x.shape[2:], *image[1:]):
        return  # which PyTorch refuses
    padded = F.pad(codes, around)
    wanted = CONVOLUTIONS[axes](padded, w, None, image.stride, 0, image.dilation)
    flat = w.movedim(1, -1).flatten(1)
    rows = ops.im2col.default(codes, *image[1:])
    assert torch.equal((rows @ flat.t()).movedim(-1, 1), wanted)


@given(images())
def test_the_backward_adds_what_windows_read(image: Image) -> None:
    """The gradient is that of PyTorch through the reference, whose additions have another order."""
    x = image.x.double().requires_grad_()
    if 0 in outputs_of(image.x.shape[2:], *image[1:]):
        return
    grad = torch.randn(image.rows().shape, dtype=torch.float64)
    REFERENCES["im2col"](x, *image[1:]).backward(grad)
    dx = ops.im2col_backward.default(grad, list(x.shape), *image[1:])
    torch.testing.assert_close(dx, x.grad, rtol=1e-12, atol=1e-12)
    mine = image.x.detach().requires_grad_()
    ops.im2col.default(mine, *image[1:]).backward(grad.to(mine.dtype))
    assert mine.grad is not None and mine.grad.shape == x.shape


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"kernel": [3]}, r"x has shape 2x8x5x5, expected a batch, channels and 1 axes"),
        ({"kernel": [3, 0]}, r"kernel is \[3x0\], expected 2 numbers of at least 1"),
        ({"stride": [1]}, r"stride is \[1\], expected 2 numbers of at least 1"),
        ({"padding": [1, 1]}, r"padding is \[1x1\], expected 4 numbers of at least 0"),
        ({"dilation": [1, -1]}, r"dilation is \[1x-1\], expected 2 numbers of at least 1"),
    ],
)
def test_what_is_no_window_is_refused(change: dict[str, Any], sentence: str) -> None:
    image = Image(torch.ones(2, 8, 5, 5, dtype=F32), [3, 3], [1, 1], [1] * 4, [1, 1])
    with pytest.raises(RuntimeError, match=sentence):
        ops.im2col.default(*image._replace(**change))


@pytest.mark.parametrize(
    ("residual", "sentence"),
    [
        (torch.ones(1, 5, 4), "residual has shape 1x5x4, but the output has shape 1x3x4"),
        (torch.ones(4), "residual has shape 4, but the output has shape 1x3x4"),
        (torch.ones(1, 3, 4).half(), "residual has dtype Half, expected Float"),
    ],
)
def test_other_residuals_are_refused(residual: Tensor, sentence: str) -> None:
    w = Weights(0, 8).int8(4)
    with pytest.raises(RuntimeError, match=sentence):
        ops.conv_dynamic.default(
            torch.ones(1, 8, 3, dtype=F32), w.packed, w.layout, None,
            [1], [1], [0, 0], [1], [8, 1, 0, 0, 0], "none", F32, None, residual,
        )  # fmt: skip


def test_channels_that_groups_do_not_divide_are_refused() -> None:
    w = Weights(0, 9).int8(4)
    with pytest.raises(RuntimeError, match="x has 7 channels, which 3 groups do not divide"):
        ops.conv_dynamic.default(
            torch.ones(1, 7, 3, dtype=F32), torch.stack([w.packed] * 3), w.layout, None,
            [3], [1], [0, 0], [1], [8, 1, 0, 0, 0], "none", F32,
        )  # fmt: skip
