"""A convolution in int8 against PyTorch in float32 and bfloat16, in both layouts of images.

The int8 operator takes images of either layout and returns channels last. All ways take turns; with
one thread the times are processor seconds.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import Candidate, clock, interleaved, keep_memory
from benchmarks.question import Question, Row, chosen
from qfx import _C, Config
from qfx.ops.forms import of_scheme
from qfx.ops.packing import Packing
from qfx.ops.single_tensors import sqnr
from qfx.weights.cache import pack

FLOAT, CHANNELS_LAST = "float32", ", channels last"


class Layer(NamedTuple):
    """A convolution: channels of the input and the output, height and width, kernel, stride."""

    channels: int
    outputs: int
    size: int
    kernel: int = 3
    stride: int = 1


CASES = {
    "ResNet-50 stem": Layer(3, 64, 224, 7, 2),
    "ResNet-50 1": Layer(64, 64, 56),
    "ResNet-50 2": Layer(128, 128, 28),
    "ResNet-50 3": Layer(256, 256, 14),
    "ResNet-50 4": Layer(512, 512, 7),
    "YOLO early": Layer(32, 64, 160, 3, 2),
    "YOLO": Layer(80, 80, 80),
    "U-Net": Layer(320, 320, 64),
    "few channels": Layer(16, 16, 160),
}
Convolution = Callable[[Tensor], Tensor]


def in_int8(layer: Layer, w: Tensor, scheme_name: str = "w8a8") -> Convolution:
    """Returns the convolution with the kernel w [N, C, kernel, kernel] in a scheme of qfx."""
    k = w[0].numel()
    scheme = Config(scheme=scheme_name).chosen.at(k, layer.channels)
    packing = Packing(scheme.w, rotation=scheme.rotation, group=scheme.group)
    packed = pack(w.movedim(1, -1).flatten(1), (), packing).weight
    how = of_scheme(scheme, layer.outputs, scheme.rotation)
    windows = ([layer.kernel] * 2, [layer.stride] * 2, [layer.kernel // 2] * 4, [1, 1])

    def run(x: Tensor) -> Tensor:
        y: Tensor = torch.ops.qfx.conv_dynamic.default(
            x, packed, how["layout"], None, *windows, how["code"], "none", x.dtype
        )
        return y.movedim(-1, 1)

    return run


def ways(layer: Layer, w: Tensor) -> dict[str, tuple[Convolution, torch.dtype]]:
    def in_float(dtype: torch.dtype) -> Convolution:
        own = w.to(dtype).contiguous(memory_format=torch.channels_last)
        return lambda x: F.conv2d(x, own, None, layer.stride, layer.kernel // 2)

    return {
        FLOAT: (in_float(torch.float32), torch.float32),
        "bfloat16": (in_float(torch.bfloat16), torch.bfloat16),
        "qfx w8a8": (in_int8(layer, w), torch.float32),
    }


def measure(name: str, rounds: int) -> list[Row]:
    torch.manual_seed(0)
    layer = CASES[name]
    shape = (layer.outputs, layer.channels, layer.kernel, layer.kernel)
    w = torch.randn(shape) * (layer.channels * layer.kernel**2) ** -0.5
    x = torch.randn(1, layer.channels, layer.size, layer.size).relu()
    last = x.contiguous(memory_format=torch.channels_last)
    candidates, outputs = {}, {}
    for way, (run, dtype) in ways(layer, w).items():
        for suffix, image in (("", x), (CHANNELS_LAST, last)):
            candidates[way + suffix] = Candidate(partial(run, image.to(dtype)))
            outputs[way + suffix] = run(image.to(dtype)).float()
    times = interleaved(candidates, rounds, clock())
    best = min(times[FLOAT], times[FLOAT + CHANNELS_LAST])
    macs = w.numel() * outputs[FLOAT][0, 0].numel()
    return [
        {"case": name, "isa": _C.isa(), "way": way, "ms": round(1e3 * taken, 3)}
        | {"of float32": round(best / taken, 2), "GMAC/s": round(macs / taken / 1e9, 1)}
        | {"SQNR dB": round(sqnr(outputs[FLOAT], outputs[way]), 1)}
        for way, taken in times.items()
    ]


@torch.inference_mode()
def tables(options: Namespace) -> Iterator[list[Row]]:
    keep_memory()
    for name in chosen(options.cases, CASES):
        yield measure(name, options.rounds)


QUESTION = Question(
    "How fast is a convolution in int8, compared with the faster layout in float32?",
    tables,
    key=("case", "way"),
    options={"cases": list(CASES)},
    rounds=9,
)
