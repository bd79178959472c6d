"""Calls every operator with random nonsense, in a process of its own whose memory is limited:
nonsense.py SEED COUNT. Some operands are expanded to 2^40 elements, some lie in the memory of
another.

Prints how many calls returned and how many raised, and by how many MB the resident set grew;
anything but a Python exception is a crash.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch import Tensor

import qfx  # noqa: F401
from tests.lib.rows import BUILDERS, Row
from tests.lib.stretched import MANY, limit_memory, resident

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8]
DTYPES += [torch.int32, torch.int64, torch.bool, torch.complex64]
STRINGS = ["none", "relu", "gelu", "", "softmax", "relu\0gelu", "x" * 1000]


def tensor(rng: random.Random) -> Tensor:
    shape = [rng.choice([0, 1, 2, 3, 16, 33]) for _ in range(rng.randrange(5))]
    t = torch.randint(-5, 100, shape).to(rng.choice(DTYPES))
    kind = rng.randrange(7)
    if kind == 6:
        one = t.new_ones(1)
        return rng.choice([one.expand(MANY), one.expand(MANY, 1), one.expand(1, 2, MANY)])
    if kind == 0 and t.ndim:
        return t.transpose(0, -1)
    if kind == 1:
        return t.expand(3, *t.shape)
    if kind == 2:
        return t.to("meta")
    if kind == 3 and t.is_floating_point():
        return t.requires_grad_()
    if kind == 4 and t.ndim:
        return t[..., 1:]
    return t


def of_rows(codes: Tensor) -> Tensor:
    return torch.ops.qfx.pack_weight(codes, torch.ones(len(codes)))


def few_bits(codes: Tensor) -> Tensor:
    scale = torch.ones(len(codes), -(-codes.shape[1] // 32))
    return torch.ops.qfx.pack_weight(codes, scale, None, None, 4, 32)


def packed(rng: random.Random) -> Tensor:
    """Returns a packed weight, in most cases damaged."""
    pack = rng.choice([of_rows, torch.ops.qfx.binary_pack, few_bits])
    good = pack(torch.ones(rng.randrange(40), rng.randrange(40)).char())
    kind = rng.randrange(4)
    if kind == 0:
        return good[: rng.randrange(good.numel() + 1)]
    if kind == 1:
        good[rng.randrange(min(128, good.numel()))] = rng.randrange(-128, 128)
    if kind == 2:
        good[16:40] = torch.randint(-128, 128, (24,), dtype=torch.int8)  # overwrites N and K
    return torch.cat([good, good])[::2] if kind == 3 else good


def value(rng: random.Random, like: Any) -> Any:
    """Returns nonsense that mostly has the types of the schema."""
    if isinstance(like, Tensor) and like.dtype == torch.int8 and like.ndim == 1:
        return packed(rng) if rng.random() < 0.7 else tensor(rng)
    if isinstance(like, Tensor) or like is None:
        return None if rng.random() < 0.1 else tensor(rng)
    if isinstance(like, bool):
        return rng.random() < 0.5
    if isinstance(like, int):
        return rng.choice([0, 1, 2, 4, 8, 9, -1, 32, 33, 2**31, 2**62, -(2**63)])
    if isinstance(like, str):
        return rng.choice(STRINGS)
    if isinstance(like, list) and isinstance(like[0], Tensor):
        return [tensor(rng) for _ in range(rng.randrange(5))]
    if isinstance(like, list):
        odd = [rng.choice([-1, 0, 1, 2, 2**40]) for _ in range(rng.randrange(4))]
        i = rng.randrange(len(like))
        return odd if rng.random() < 0.5 else [*like[:i], *odd[:1], *like[i + 1 :]]
    return rng.choice(DTYPES)


def overlay(rng: random.Random, arguments: list[Any]) -> None:
    """Moves a tensor into the memory of another, if it fits."""
    tensors = [
        i for i, a in enumerate(arguments) if isinstance(a, Tensor) and a.device.type == "cpu"
    ]
    if len(tensors) < 2:
        return
    i, j = rng.sample(tensors, 2)
    like, memory = arguments[i].detach(), arguments[j].detach().untyped_storage()
    room = memory.nbytes() // like.element_size() - like.numel()
    if room >= 0 and like.is_contiguous():
        offset, values = rng.randrange(room + 1), like.clone()
        made = like.new_empty(0).set_(memory, offset, like.shape, like.stride())
        arguments[i] = made if rng.random() < 0.3 else made.copy_(values)


def main(seed: int, count: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    returned = raised = 0
    limit_memory()
    before = resident()
    for _ in range(count):
        op = rng.choice(sorted(BUILDERS))
        arguments = list(Row(op, leading=(rng.randrange(4),), k=rng.randrange(40)).arguments(seed))
        for i in rng.sample(range(len(arguments)), rng.randrange(len(arguments)) + 1):
            arguments[i] = value(rng, arguments[i]) if rng.random() < 0.7 else arguments[i]
        for _ in range(rng.randrange(3)):
            overlay(rng, arguments)
        try:
            getattr(torch.ops.qfx, op)(*arguments)
            returned += 1
        except Exception:
            raised += 1
    print(f"{returned} returned, {raised} raised, {resident() - before:.0f} MB")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
