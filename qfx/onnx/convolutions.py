"""Windows of convolutions in ONNX. ONNX has no im2col: a tap of all windows is a Slice of the
image. (C1)"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from qfx.onnx.opset import Value, ints, opset

Sizes = Sequence[int]


def windows(x: Value, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes) -> Value:
    """Returns the windows of x [B, C, *sizes] as rows [B, *outputs, taps * C]. `padding`: the zeros
    before and after each axis, two numbers for each axis."""
    op, axes = opset(), range(2, 2 + len(kernel))
    padded = op.Pad(x, pads(padding)) if any(padding) else x
    taps = []
    for tap in product(*map(range, kernel)):
        begin = [at * gap for at, gap in zip(tap, dilation, strict=True)]
        behind = [
            gap * (size - 1) - at for at, gap, size in zip(begin, dilation, kernel, strict=True)
        ]
        end = [-n if n else 2**62 for n in behind]
        taps.append(op.Slice(padded, ints(*begin), ints(*end), ints(*axes), ints(*stride)))
    whole = taps[0] if len(taps) == 1 else op.Concat(*taps, axis=1)
    return op.Transpose(whole, perm=[0, *axes, 1])


def pads(padding: Sizes) -> Value:
    """Returns the argument of Pad for an image [B, C, *sizes]."""
    return ints(0, 0, *padding[::2], 0, 0, *padding[1::2])
