"""Words of programs, one of each operation, and slots of memory between canaries."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qfx._C import Program
from qfx.ops.kv_cache import kv_empty
from qfx.programs.bytecode import BINARY, ELEMENTS, OPERATIONS, UNARY

ops = torch.ops.qfx
CANARY = 0x5A
EDGE = 4096


def operand(slot: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> list[int]:
    strides = torch.empty(shape, device="meta").stride()
    return [slot, offset, ELEMENTS[dtype], len(shape), *shape, *strides]


def floats(slot: int, *shape: int) -> list[int]:
    return operand(slot, shape, torch.float32)


def say(name: str, *parts: Any) -> list[int]:
    words = [OPERATIONS.index(name)]
    for part in parts:
        words += part if isinstance(part, list) else [part]
    return [len(words), *words]


def double(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


ONES, ONE = torch.ones(32, 16, dtype=torch.int8), torch.ones(32, 1)
W, FEW = (ops.pack_weight.default(ONES, ONE, None, None, *how) for how in ((8, 0), (4, 32)))
# Weights of two experts, [32, 16] and [16, 16].
STACK, NARROW = (
    torch.stack([ops.pack_weight.default(ONES[:n], ONE[:n])] * 2).contiguous() for n in (32, 16)
)
KEYS, KEY_SCALE, VALUES, VALUE_SCALE = kv_empty(1, 2, 16, 8)
CODE = [8, 1, 0, 0, 0]  # bits, symmetric, per_tensor, group, rotation
QUANTIZED = [0, *CODE]  # without a factor
PLAIN = [0, 0]  # bias, activation
CACHE = [
    *operand(1, tuple(KEYS.shape), torch.int8),
    *floats(2, *KEY_SCALE.shape),
    *operand(3, tuple(VALUES.shape), torch.int8),
    *floats(4, *VALUE_SCALE.shape),
]
I64 = torch.int64


class Given:
    """Slots 1.. of so many bytes, each between canaries; `held` are constants of them."""

    def __init__(self, words: list[int], slots: list[int | Tensor]) -> None:
        self.words, self.sizes = words, [256]
        self.memory = []
        self.addresses = [0]
        for slot in slots:
            content = torch.zeros(slot, dtype=torch.uint8) if isinstance(slot, int) else slot
            raw = content.contiguous().flatten().view(torch.uint8)
            memory = torch.full((raw.numel() + 2 * EDGE,), CANARY, dtype=torch.uint8)
            memory[EDGE : EDGE + raw.numel()] = raw
            self.memory.append(memory)
            self.sizes.append(raw.numel())
            self.addresses.append(0 if isinstance(slot, int) else memory.data_ptr() + EDGE)

    def program(self, words: list[int] | None = None) -> Program:
        return Program(self.words if words is None else words, self.sizes, self.addresses)

    def run(self, words: list[int] | None = None) -> None:
        program = self.program(words)
        open_ = [m for m, a in zip(self.memory, self.addresses[1:], strict=True) if a == 0]
        program.run([m.data_ptr() + EDGE for m in open_])

    def whole(self) -> bool:
        return all(
            bool((m[:EDGE] == CANARY).all() and (m[-EDGE:] == CANARY).all()) for m in self.memory
        )


PROGRAMS: dict[str, Callable[[], Given]] = {
    "copy": lambda: Given(say("copy", floats(1, 3, 4), floats(2, 3, 4)), [48, 48]),
    "unary": lambda: Given(
        say("unary", UNARY.index("exp"), floats(1, 3, 4), floats(2, 3, 4)), [48, 48]
    ),
    "binary": lambda: Given(
        say("binary", BINARY.index("add"), floats(1, 3, 4), floats(2, 3, 4), floats(0, 3, 4)),
        [48, 48],
    ),
    "mean": lambda: Given(say("mean", floats(1, 3, 1), floats(2, 3, 4)), [12, 48]),
    "sum": lambda: Given(say("sum", floats(1, 3, 1), floats(2, 3, 4)), [12, 48]),
    "embedding": lambda: Given(
        say("embedding", floats(1, 3, 4), operand(2, (3,), I64), floats(3, 5, 4)), [48, 24, 80]
    ),
    "linear": lambda: Given(
        say(
            "linear",
            floats(1, 2, 16),
            QUANTIZED,
            2,
            *(floats(2, 2, 32), PLAIN, operand(3, (W.numel(),), torch.int8)),
            *(floats(4, 2, 32), PLAIN, operand(5, (FEW.numel(),), torch.int8)),
        ),
        [128, 256, W, 256, FEW],
    ),
    "kv_write": lambda: Given(
        say("kv_write", CACHE, floats(5, 1, 2, 3, 8), floats(6, 1, 2, 3, 8), operand(7, (3,), I64)),
        [KEYS, KEY_SCALE, VALUES, VALUE_SCALE, 192, 192, 24],
    ),
    "kv_attention": lambda: Given(
        say(
            "kv_attention",
            CACHE,
            floats(5, 1, 4, 3, 8),
            floats(6, 1, 4, 3, 8),
            1,
            floats(7, 1, 4, 3, 9),
            double(0.3),
            9,
            1,
            operand(8, (1, 1), torch.int32),
            double(2.0),
        ),
        [KEYS, KEY_SCALE, VALUES, VALUE_SCALE, 384, 384, 432, 4],
    ),
    "where": lambda: Given(
        say("where", floats(1, 3, 4), floats(2, 3, 4), floats(3, 3, 4), floats(0, 3, 4)),
        [48, 48, 48],
    ),
    "float_linear": lambda: Given(
        say(
            "float_linear",
            *(floats(1, 2, 20), floats(2, 2, 16), operand(3, (20, 16), torch.bfloat16)),
            *(1, floats(4, 20)),
        ),
        [160, 128, 640, 80],
    ),
    "softmax": lambda: Given(say("softmax", floats(1, 3, 4), floats(2, 3, 4)), [48, 48]),
    "top_k": lambda: Given(
        say("top_k", floats(1, 3, 2), operand(2, (3, 2), I64), floats(3, 3, 4)), [24, 48, 48]
    ),
    "gather": lambda: Given(
        say("gather", floats(1, 3, 2), floats(2, 3, 4), operand(3, (3, 2), I64)), [24, 48, 48]
    ),
    "scatter": lambda: Given(
        say("scatter", floats(1, 3, 4), operand(2, (3, 2), I64), double(1.0)), [48, 48]
    ),
    "attention": lambda: Given(
        say(
            "attention",
            *(floats(1, 1, 2, 3, 8), floats(2, 1, 2, 3, 8), floats(3, 1, 1, 5, 8)),
            *(floats(4, 1, 1, 5, 8), 0, double(0.3), 0, 1, floats(5, 1, 2, 3, 5)),
        ),
        [192, 192, 160, 160, 120],
    ),
    "layer_norm": lambda: Given(
        say(
            "layer_norm",
            *(floats(n, 3, 4) for n in (1, 2)),
            1,
            floats(3, 4),
            1,
            floats(4, 4),
            double(1e-5),
        ),
        [48, 48, 16, 16],
    ),
    "experts": lambda: Given(
        say(
            "experts",
            *(floats(1, 3, 16), floats(2, 3, 16), operand(3, (3, 2), I64), floats(4, 3, 2)),
            *(CODE, 1, 1, double(0.0), double(0.0)),
            *(operand(5, tuple(STACK.shape), torch.int8), 1, floats(6, 2, 32)),
            *(CODE, operand(7, tuple(NARROW.shape), torch.int8), 0),
        ),
        [192, 192, 48, 24, STACK, 256, NARROW],
    ),
}
