"""Calls every operator with an operand expanded to 2^40 elements, alone and together with a second
wrong argument, in a process of its own whose memory is limited: stretched.py LIBRARY SHARE SEED.

LIBRARY is the namespace of the operators, `qfx` or `qfx_emulated`. SHARE is the fraction of the
calls with a second wrong argument that are made, drawn with SEED. The same call with 7 elements
shows what to expect: if it is refused, an operator that checks before it copies also refuses 2^40
elements; an operator that runs out of memory copied first. Prints each call that did, then the
number of calls and the growth of the resident set in MB.
"""

from __future__ import annotations

import random
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import qfx  # noqa: F401
from qfx.host.operators import has_kernel
from qfx.ops.header import MINIMUMS, ZERO_POINTS
from qfx.ops.registry import IN_PYTHON
from tests.cuda import emulator
from tests.lib.rows import BUILDERS, VARIANTS, Row

FEW, MANY = 7, 2**40
ADDRESSES = 1 << 30  # bytes that a call may map in addition to what the process has
Stretch = Callable[[int], Tensor]
Slot = tuple[int, ...]  # the place of an argument, or of a tensor in a list of them
ABSENT = (torch.ones(1), torch.ones(1, dtype=torch.int32), torch.ones(1, dtype=torch.int64))


def rows(op: str) -> list[Row]:
    kinds = VARIANTS.get(op, ({},))
    found = [Row(op, **kind) for kind in kinds]
    found.append(Row(op, leading=(2, 3, 4), symmetric=True, k=16))
    found.append(Row(op, k=128, group=64, factor=True, rotation=16))
    if any(kind.get("w_bits") for kind in kinds):
        found.append(Row(op, k=128, group=64, w_bits=4, x_groups=True, shift=ZERO_POINTS))
        found.append(
            Row(op, k=128, group=64, w_bits=4, factor=True, symmetric=True, shift=MINIMUMS)
        )
    return found


def stretches(t: Tensor) -> list[Stretch]:
    """Returns functions that make tensors of t's dtype with an axis of any size, whose elements
    share memory."""
    one = t.new_ones(1)
    found: list[Stretch] = [
        lambda n: one.expand(n),
        lambda n: one.expand(n, 1),
        lambda n: one.expand(1, n),
    ]
    for axis in range(t.dim() if t.numel() else 0):
        found.append(lambda n, axis=axis: _along(t, axis, n))
    return found


def _along(t: Tensor, axis: int, n: int) -> Tensor:
    return t.narrow(axis, 0, 1).expand(*t.shape[:axis], n, *t.shape[axis + 1 :])


def wrong(argument: Any) -> list[Any]:
    """Returns arguments of the same type that are mostly useless to an operator."""
    if isinstance(argument, Tensor):
        return [argument.new_zeros(2, 1, 3, 1, 1), torch.zeros(argument.shape, dtype=torch.bool)]
    if isinstance(argument, bool):
        return []
    if isinstance(argument, (int, float)):
        return [type(argument)(-1)]
    if isinstance(argument, str):
        return ["softmax"]
    if isinstance(argument, list):
        if any(isinstance(each, Tensor) or each is None for each in argument):
            return [argument[:-1]]
        return [["softmax" for _ in argument]] if isinstance(argument[0], str) else [[7]]
    return [torch.int64] if isinstance(argument, torch.dtype) else [torch.zeros(3, 1, 2)]


def slots(arguments: tuple[Any, ...]) -> list[Slot]:
    """Returns the places where tensors are, or could be."""
    found: list[Slot] = []
    for i, argument in enumerate(arguments):
        if isinstance(argument, Tensor) or argument is None:
            found.append((i,))
        elif isinstance(argument, list) and isinstance(argument[0], Tensor):
            found += [(i, j) for j in range(len(argument))]
    return found


def with_one(arguments: Sequence[Any], slot: Slot, value: Any) -> list[Any]:
    """Returns the arguments with another value in a slot."""
    i, *inner = slot
    new = with_one(arguments[i], tuple(inner), value) if inner else value
    return [*arguments[:i], new, *arguments[i + 1 :]]


def calls(arguments: tuple[Any, ...]) -> Iterator[tuple[str, bool, Callable[[int], list[Any]]]]:
    """Yields what is stretched, whether something else is wrong too, and a function from the size
    to the arguments."""
    for slot in slots(arguments):
        i, held = slot[0], arguments[slot[0]]
        held = held[slot[1]] if len(slot) == 2 else held
        for t in [held] if held is not None else ABSENT:
            for s, stretch in enumerate(stretches(t)):

                def alone(n: int, slot: Slot = slot, stretch: Stretch = stretch) -> list[Any]:
                    return with_one(arguments, slot, stretch(n))

                yield f"{slot} stretched by {s}", False, alone
                for j, other in enumerate(arguments):
                    for w, bad in enumerate(wrong(other) if j != i else ()):

                        def both(n: int, j: int = j, bad: Any = bad, alone: Any = alone) -> Any:
                            return with_one(alone(n), (j,), bad)

                        yield f"{slot} stretched by {s} beside wrong {w} of {j}", True, both


def said(op: Callable[..., Any], arguments: list[Any]) -> str:
    """Returns the error's text, or '' if there was none."""
    try:
        op(*arguments)
    except Exception as why:
        return f"{type(why).__name__}: {why}".partition("\n")[0]
    return ""


def resident() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def limit_memory() -> None:
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ADDRESSES, hard))


def check(library: str, share: float, rng: random.Random) -> int:
    made = 0
    for name in sorted({*BUILDERS} - {*IN_PYTHON}):  # PyTorch checks what is in Python
        op = getattr(getattr(torch.ops, library), name)
        if not has_kernel(f"{library}::{name}", "CPU"):
            continue  # the emulator has no kernel if CUDA has none
        for row in rows(name):
            if library != "qfx" and row.w_bits != 8:
                continue  # low bits are packed by Python (qfx/ops/cuda_float_linear.py)
            arguments = row.arguments() if library == "qfx" else emulator.arguments_of(row)
            for what, other, stretched in calls(arguments):
                if other and rng.random() > share:
                    continue
                few, many = said(op, stretched(FEW)), said(op, stretched(MANY))
                made += 2
                if few and (not many or "memory" in many):
                    print(f"{row}: argument {what}: of {FEW}: {few}; of {MANY}: {many}")
                elif many and f"{name.removesuffix('_ste')}: " not in many.replace("_ste: ", ": "):
                    print(f"{row}: argument {what}: no sentence: {many}")
    return made


if __name__ == "__main__":
    library, share, seed = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    if library != "qfx":
        emulator.library()
        emulator.emulate()
    torch.set_num_threads(1)
    check(library, 0, random.Random(seed))  # loads what is loaded at first use
    limit_memory()
    before = resident()
    count = check(library, share, random.Random(seed))
    print(f"{count} calls, {resident() - before:.0f} MB")
