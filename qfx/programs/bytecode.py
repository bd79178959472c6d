"""Bytecode: instructions in the form that csrc/cpu/program reads, lists of 64-bit integers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from qfx.programs.memory import Region

MOST_AXES = 6
ELEMENTS = {
    torch.float32: 0,
    torch.int64: 1,
    torch.int32: 2,
    torch.int8: 3,
    torch.uint8: 3,
    torch.bool: 3,
    torch.bfloat16: 4,
    torch.float16: 5,
}
# In the order of csrc/cpu/program/instruction.h and floats.cpp.
OPERATIONS = (
    "copy", "unary", "binary", "mean", "sum", "embedding", "linear", "kv_write", "kv_attention",
    "where", "float_linear", "softmax", "top_k", "gather", "scatter", "experts",
    "attention", "layer_norm",
)  # fmt: skip
UNARY = (
    "neg", "abs", "reciprocal", "sqrt", "rsqrt", "exp", "tanh", "sigmoid", "silu", "gelu",
    "gelu_tanh", "relu", "cos", "sin",
)  # fmt: skip
BINARY = ("add", "sub", "mul", "div", "pow", "maximum", "minimum")


@dataclass(frozen=True)
class Operand:
    """A strided part of a region; `offset` in bytes, strides in elements."""

    region: Region
    offset: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def contiguous(self) -> bool:
        if 0 in self.sizes:
            return True
        step = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True

    def viewed(self, sizes: Sequence[int]) -> Operand:
        """Returns the same elements, which must be contiguous, in another shape."""
        assert self.contiguous
        return replace(self, sizes=tuple(sizes), strides=contiguous_strides(sizes))

    def expanded(self, sizes: Sequence[int]) -> Operand:
        """Returns the operand broadcast to a shape."""
        more = len(sizes) - len(self.sizes)
        own = ((1,) * more + self.sizes, (0,) * more + self.strides)
        strides = tuple(
            0 if n == 1 and size != 1 else s for n, s, size in zip(*own, sizes, strict=True)
        )
        return replace(self, sizes=tuple(sizes), strides=strides)


Instruction = tuple["int | float | Operand", ...]


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def encode(instruction: Instruction, places: dict[Region, tuple[int, int]]) -> list[int]:
    """Returns an instruction as 64-bit integers, preceded by their number. `places`: for each
    region, the slot (the index of the memory that contains it) and its first byte there."""
    words: list[int] = []
    for part in instruction:
        if isinstance(part, Operand):
            slot, begin = places[part.region]
            words += (slot, begin + part.offset, ELEMENTS[part.dtype], len(part.sizes))
            words += (*part.sizes, *part.strides)
        elif isinstance(part, float):
            words += struct.unpack("<q", struct.pack("<d", part))
        else:
            words.append(int(part))
    return [len(words), *words]
