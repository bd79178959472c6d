"""Corrections: the seconds that an int8 or float GEMM takes in addition to the times in its grid.

The times in a grid are measured for even sizes and for activations that are quantized
asymmetrically. Corrections account for uneven sizes, for activations that are quantized in other
ways, for rotation, and for training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qfx.cost.grid import LONGEST, count, seconds
from qfx.cost.grid_timing import ROUNDS, Extra, random
from qfx.cost.linears import ASYMMETRIC, AXES, BLOCK, VECTOR, column
from qfx.cost.timing import fastest
from qfx.ops.code import Code
from qfx.ops.depthwise import stored_taps
from qfx.ops.header import PANEL
from qfx.ops.layout import Layout
from qfx.ops.packing import Packing
from qfx.values.scheme import QSpec, Scheme
from qfx.weights.cache import pack

NARROW, WIDE = (1024, 64), (256, 1024)  # rows and features with which a pass is measured
Pass = Callable[[Tensor], Any]
_ROWS, _ASYMMETRIC_ROWS = list(Code()), list(Code(symmetric=0))
ops = torch.ops.qfx


def symmetric(dtype: torch.dtype) -> list[float]:
    """Measures the seconds per row of activations that are saved if they are quantized
    symmetrically, so that no zero point is computed."""
    return [_row_s(_dynamic, lambda x: ops.quantize(x, _ROWS), dtype, *NARROW)]


def static(dtype: torch.dtype) -> list[float]:
    """Measures the seconds, per row and per element, that are saved if activations have a static
    scale, so that their range need not be found."""
    return more(_dynamic, _static(), dtype)


def static_call(dtype: torch.dtype) -> list[float]:
    """Measures the seconds that a call with a static scale adds: it consists of two operators
    instead of one."""
    x, w, codes = random(1, 64, dtype), random(PANEL, 64, dtype), _static()
    given = (pack(w, (), Packing(QSpec())).weight, list(Layout(PANEL)), None)
    one, two = fastest(
        lambda: ops.linear_dynamic(x, *given, _ASYMMETRIC_ROWS, "none", dtype),
        lambda: ops.linear(*codes(x), *given, "none", dtype),
    )
    return [two - one]


def rotation(dtype: torch.dtype) -> list[float]:
    """Measures the seconds, per row and per element, that rotation in blocks of 64 adds to the
    quantization of activations."""
    code = list(Code(symmetric=0, rotation=64))
    return more(lambda x: ops.quantize(x, code), _dynamic, dtype)


def turn(dtype: torch.dtype) -> list[float]:
    """Measures the seconds, per row and per element, of a rotation by itself, forward or back."""
    return more(lambda x: ops.rotate(x, None, 64), lambda x: None, dtype)


def training(dtype: torch.dtype, size: int = 512) -> list[float]:
    """Measures seconds per element for packing a weight, quantizing it for the backward, and
    dequantizing activations."""
    w = random(size, size, dtype)
    q, scale, zero_point = _dynamic(w)
    times = fastest(
        lambda: pack(w, (), Packing(QSpec())),
        lambda: ops.fake_quantize(w, [1], 8, True, dtype),
        lambda: ops.dequantize(q, scale, zero_point, None, None, "none", dtype),
    )
    return [s / size**2 for s in times]


def windows(dtype: torch.dtype) -> list[float]:
    """Measures what the rotated windows of images take in addition to rows that are in memory and
    not rotated: seconds per pixel of a window, if pixels are rotated, and per element, if windows
    are; and a float convolution as a fraction of the linear of its windows."""
    pixels, share = _windows(dtype, c=32, kernel=3, rotation=16)
    elements, _ = _windows(dtype, c=3, kernel=7, rotation=64)
    return [pixels / 9, elements / (3 * 49), share]


def _windows(
    dtype: torch.dtype, c: int, kernel: int, rotation: int, size: int = 32, n: int = 64
) -> tuple[float, float]:
    """Returns the seconds that are added per window, and the fraction in float."""
    x = random(size * size, c, dtype).view(1, size, size, c).permute(0, 3, 1, 2)
    how = ([kernel] * 2, [1, 1], [kernel // 2] * 4, [1, 1])
    rows = ops.im2col(x, *how).flatten(0, -2).contiguous()
    w = random(n, rows.shape[1], dtype)
    image_w = w.view(n, kernel, kernel, c).permute(0, 3, 1, 2)
    given = (pack(w, (), Packing(QSpec())).weight, list(Layout(n)), None)
    rotated = list(Code(symmetric=0, rotation=rotation))
    conv, linear, in_int8, rows_in_int8 = fastest(
        lambda: F.conv2d(x, image_w, None, 1, kernel // 2),
        lambda: F.linear(rows, w),
        lambda: ops.conv_dynamic(x, *given, *how, rotated, "none", dtype),
        lambda: ops.linear_dynamic(rows, *given, _ASYMMETRIC_ROWS, "none", dtype),
        rounds=ROUNDS,
    )
    return (in_int8 - rows_in_int8) / len(rows), conv / linear


def depthwise(dtype: torch.dtype, c: int = 256, size: int = 28) -> list[float]:
    """Measures depthwise convolutions: in int8 the seconds per element of the input, per output and
    per four taps of an output; in float those of a call, per element of the input, per output and
    per tap of an output."""
    x = random(size * size, c, dtype).view(1, size, size, c).permute(0, 3, 1, 2)
    short, long, half = (_depthwise(x, *how) for how in ((3, 1), (7, 1), (3, 2)))
    inputs = c * size * size
    call_s = min(each[1] for each in (short, long, half))
    int8 = _parts([each[2] / inputs for each in (short, long, half)], 3, 14)
    floats = _parts([max(each[0] - call_s, 0.0) / inputs for each in (short, long, half)], 9, 49)
    return [*int8, call_s, *floats]


def _parts(seconds: Sequence[float], fewer: int, more: int) -> list[float]:
    """Returns the seconds per input, per output and per tap. `seconds`: per input of a convolution
    with `fewer` taps, of one with `more` and of the first with stride 2, which has a quarter of the
    outputs. None is negative."""
    short, long, half = seconds
    tap_s = max(long - short, 0.0) / (more - fewer)
    outputs_s = min(max(short - half, 0.0) / 0.75, short)
    output_s = max(outputs_s - fewer * tap_s, 0.0)
    return [max(short - output_s - fewer * tap_s, 0.0), output_s, tap_s]


def _depthwise(x: Tensor, kernel: int, stride: int) -> tuple[float, float, float]:
    """Returns the seconds in float, those in float with an image of one pixel, and those in int8
    without the call from Python, of which compiled graphs make a shorter one
    (qfx/host/direct_calls.py)."""
    c, around = x.shape[1], kernel // 2
    w = random(c, kernel * kernel, x.dtype).view(c, 1, kernel, kernel)
    rows = F.pad(w, (0, stored_taps(kernel) - kernel)).flatten(1)
    given = (pack(rows, (), Packing(QSpec())).weight, list(Layout(c)), None)
    how = ([kernel] * 2, [stride] * 2, [around] * 4, [1, 1], _ASYMMETRIC_ROWS, "none", x.dtype)
    last = w.contiguous(memory_format=torch.channels_last)
    pixel = x[..., :1, :1]
    float_s, float_call_s, int8_s, int8_call_s = fastest(
        lambda: F.conv2d(x, last, None, stride, around, groups=c),
        lambda: F.conv2d(pixel, last, None, stride, around, groups=c),
        lambda: ops.conv_depthwise(x, *given, *how),
        lambda: ops.conv_depthwise(pixel, *given, *how),
        rounds=4 * ROUNDS,
    )
    return float_s, float_call_s, max(int8_s - int8_call_s, 0.0)


def columns(m: int, dtype: torch.dtype, k: int = 512, n: int = 4 * BLOCK) -> Iterator[float]:
    """Yields the cost of 0, 1, .. output columns beyond a multiple of BLOCK, for float matmuls of
    `m` rows. The unit is a sixteenth (1 / BLOCK) of the seconds of a whole block."""
    x, weights = random(m, k, dtype), [random(n + i, k, dtype) for i in range(BLOCK + 1)]
    none, *times = fastest(*(partial(F.linear, x, w) for w in weights), rounds=ROUNDS)
    whole = max(times[-1] - none, 1e-9)
    yield from (0.0, *(BLOCK * max(t - none, 0.0) / whole for t in times[:-1]))


def uneven(dtype: torch.dtype, m: int = 256, k: int = 2 * VECTOR, n: int = PANEL) -> list[float]:
    """Measures the seconds per row of activations that are added if K lies between two multiples of
    VECTOR, excluding the time of the additional features."""
    even, odd, next_even = (
        column(Scheme(ASYMMETRIC), k + i, n, dtype)(m)[1] for i in (0, 20, VECTOR)
    )
    return [max(odd - (even + next_even) / 2, 0.0) / m]


def more(call: Pass, less: Pass, dtype: torch.dtype) -> list[float]:
    """Measures by how many seconds, per row and per element, `call` is slower than `less`, by
    timing both with narrow and with wide rows."""
    narrow, wide = (_row_s(call, less, dtype, *size) for size in (NARROW, WIDE))
    element = max(wide - narrow, 0.0) / (WIDE[1] - NARROW[1])
    return [max(narrow - NARROW[1] * element, 0.0), element]


def _row_s(call: Pass, less: Pass, dtype: torch.dtype, m: int, k: int) -> float:
    x = random(m, k, dtype)
    some, more = fastest(partial(less, x), partial(call, x))
    return max(more - some, 0.0) / m


def _dynamic(x: Tensor) -> Any:
    return ops.quantize(x, _ASYMMETRIC_ROWS)


def _static() -> Pass:
    scale = torch.tensor([0.02], dtype=torch.float32, device="cpu")
    return lambda x: ops.quantize(x, _ROWS, scale)


CORRECTIONS = {  # in the order in which they are measured
    "static_call": Extra(static_call, 1, partial(seconds, least=-LONGEST)),
    "static": Extra(static, 2),
    "training": Extra(training, 3),
    **{f"columns_{m}": Extra(partial(columns, m), BLOCK, count) for m in AXES[0]},
    "uneven": Extra(uneven, 1),
    "symmetric": Extra(symmetric, 1),
    "rotation": Extra(rotation, 2),
    "turn": Extra(turn, 2),
    "windows": Extra(windows, 3, partial(seconds, least=-LONGEST)),
    "depthwise": Extra(depthwise, 7),
}
