"""conv_depthwise: each channel of an image is quantized as a row, and multiplied by a kernel of its
own, with the same bits on every instruction set."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import qfx._C as _C
from qfx.ops.code import Code
from qfx.ops.depthwise import stored_taps
from qfx.ops.layout import Layout
from qfx.ops.registry import REFERENCES
from tests.conftest import on_isa, on_threads, same_bits
from tests.ops.test_op_convolution import laid_out

ops = torch.ops.qfx
F32 = torch.float32


def packed(w: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the packed weight of kernels [C, lines, taps], and w as it is quantized."""
    scale = w.abs().amax((1, 2)).clamp_min(1e-6) / 127
    codes = (w / scale[:, None, None]).round()
    rows = F.pad(codes, (0, stored_taps(w.shape[2]) - w.shape[2])).flatten(1)
    return ops.pack_weight.default(rows.to(torch.int8), scale), codes * scale[:, None, None]


@st.composite
def calls(draw: Any) -> tuple[Any, ...]:
    """Draws the arguments of a call: images of all layouts and types, also empty ones and such of
    one pixel, with every number of taps of a line and of lanes in the last vector."""
    axes = draw(st.integers(1, 2))
    each = lambda *of: [draw(st.sampled_from(of)) for _ in range(axes)]  # noqa: E731
    sizes, kernel, stride = each(1, 2, 5, 9, 31), each(1, 2, 3, 4, 5, 7, 9), each(1, 2, 3)
    padding = [draw(st.integers(0, 4)) for _ in range(2 * axes)]
    dilation = [draw(st.sampled_from((1, 2))), 1][-axes:]
    channels, batch = draw(st.sampled_from((1, 7, 16, 33, 64))), draw(st.sampled_from((1, 2, 0)))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    x = torch.randn(batch, channels, *sizes, generator=g) + draw(st.sampled_from((0, 1)))
    x[:, ::2] *= draw(st.sampled_from((1.0, -0.0, math.nan, math.inf, 6e4, 1e-30)))
    x = x.to(draw(st.sampled_from((F32, torch.bfloat16, torch.float16))))
    x = laid_out(x, draw(st.sampled_from(("contiguous", "channels last", "exchanged"))))
    w = torch.randn(channels, kernel[0] if axes == 2 else 1, kernel[-1], generator=g)
    bias = torch.randn(channels, generator=g) if draw(st.booleans()) else None
    code = list(Code(bits=draw(st.sampled_from((8, 5))), symmetric=draw(st.integers(0, 1))))
    out = draw(st.sampled_from((F32, torch.bfloat16, torch.float16)))
    windows = (kernel, stride, padding, dilation)
    return (x, packed(w)[0], list(Layout(channels)), bias, *windows, code, "relu", out)


@given(calls(), st.sampled_from((1, 3)))
def test_every_instruction_set_has_the_bits_of_the_reference(call: Any, threads: int) -> None:
    wanted = REFERENCES["conv_depthwise"](*call)
    for isa in _C.isas():
        with on_isa(isa), on_threads(threads):
            y = ops.conv_depthwise.default(*call)
        assert same_bits(y, wanted), isa


@pytest.mark.parametrize("isa", _C.isas())
def test_a_code_beyond_the_last_is_clamped(isa: str) -> None:
    """With a scale of 1 and a zero point of -26 the code of 153.5 would be 128: kernels that omit
    clamps have to see this. The next channels need none."""
    x = torch.linspace(-101.5, 153.5, 256, dtype=F32).view(1, 1, 16, 16).repeat(1, 40, 1, 1)
    x[:, 20:] /= 3
    weight = packed(torch.ones(40, 3, 3, dtype=F32))[0]
    how = ([3, 3], [1, 1], [1] * 4, [1, 1], [8, 0, 0, 0, 0], "none", F32)
    call = (laid_out(x, "channels last"), weight, list(Layout(40)), None, *how)
    with on_isa(isa):
        assert same_bits(ops.conv_depthwise.default(*call), REFERENCES["conv_depthwise"](*call))


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (5, 1), (5, 2), (7, 1)])
def test_it_is_a_depthwise_convolution(kernel: int, stride: int) -> None:
    """Within half a step of the codes of x for each tap, the weights being exact."""
    g = torch.Generator().manual_seed(kernel)
    x = torch.randn(2, 48, 20, 17, generator=g)
    weight, w = packed(torch.randn(48, kernel, kernel, generator=g))
    how = ([kernel] * 2, [stride] * 2, [kernel // 2] * 4, [1, 1])
    y = ops.conv_depthwise.default(
        x, weight, list(Layout(48)), None, *how, [8, 0, 0, 0, 0], "none", F32
    )
    wanted = F.conv2d(x, w.unsqueeze(1), None, stride, kernel // 2, groups=48)
    step = (x.amax((2, 3)).clamp_min(0) - x.amin((2, 3)).clamp_max(0)) / 255
    bound = (0.51 * step * w.abs().sum((1, 2)) + 1e-4)[..., None, None]
    assert ((y.movedim(-1, 1) - wanted).abs() <= bound).all()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({4: [3, 3, 3]}, "x has shape 1x8x5x5, expected a batch, channels and 3 axes"),
        ({7: [1, 2]}, "dilation 2 of the last axis, expected one or two axes"),
        ({8: [8, 0, 0, 0, 64]}, "one scale for each channel of an image and no rotation"),
        ({8: [8, 0, 1, 0, 0]}, "one scale for each channel of an image and no rotation"),
        ({2: [9, 8, 0, 0, 0]}, "the weight has n=9, but x has 8 channels"),
    ],
    ids=str,
)
def test_what_is_no_depthwise_convolution_is_refused(change: dict[int, Any], sentence: str) -> None:
    call: list[Any] = [
        torch.ones(1, 8, 5, 5, dtype=F32), packed(torch.ones(8, 3, 3, dtype=F32))[0],
        list(Layout(8)), None, [3, 3], [1, 1], [1] * 4, [1, 1], [8, 0, 0, 0, 0], "none", F32,
    ]  # fmt: skip
    for place, value in change.items():
        call[place] = value
    with pytest.raises(RuntimeError, match=sentence):
        ops.conv_depthwise.default(*call)
