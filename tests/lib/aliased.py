"""Calls every operator that writes its arguments with operands that share memory, in a process of
its own: aliased.py ROUNDS SEED.

An operand that is read may lie in memory that the operator writes, for example places of tokens in
the codes of the cache. The call must then return the same as for a clone of the operand, or raise
an error sentence before anything is written. Prints how many calls returned and how many were
refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import qfx  # noqa: F401
from qfx.host.operators import schema
from tests.lib.rows import BUILDERS, Row

Arguments = list[Any]


def written(name: str) -> list[int]:
    """Returns the indices of the arguments that operator `name` writes."""
    arguments = schema(getattr(torch.ops.qfx, name).default).arguments
    return [
        i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write
    ]


def view(memory: Tensor, offset: int, like: Tensor) -> Tensor:
    """Returns a tensor of the dtype, shape and values of `like`, in the memory of another one."""
    flat = memory.view(-1).view(torch.uint8)[offset : offset + like.numel() * like.element_size()]
    return flat.view(like.dtype).view(like.shape).copy_(like)


def overlaid(arguments: Arguments, target: int, other: int) -> Iterator[Arguments]:
    """Yields the arguments with `other` at several places in the memory of `target`."""
    size = arguments[other].numel() * arguments[other].element_size()
    room = arguments[target].numel() * arguments[target].element_size() - size
    for offset in sorted({0, room // 2 // 8 * 8, room // 8 * 8}) if room >= 0 else ():
        made = [a.clone() if isinstance(a, Tensor) else a for a in arguments]
        made[other] = view(made[target], offset, made[other])
        yield made


def state(arguments: Arguments) -> list[Tensor]:
    return [a.clone() for a in arguments if isinstance(a, Tensor)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(
        torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, b, strict=True)
    )


def check(name: str, arguments: Arguments, read: set[int]) -> bool:
    """Calls an operator and returns whether it returned. If it did, it must have written the same
    as for clones of the arguments in `read`; if not, nothing."""
    op = getattr(torch.ops.qfx, name)
    before = state(arguments)
    expected = [a.clone() if i in read else a for i, a in enumerate(arguments)]
    try:
        op(*arguments)
    except RuntimeError as why:
        assert str(why).partition(f"{name}: ")[2], why
        assert same(state(arguments), before), f"{name} has written before it refused: {why}"
        return False
    got = [state(arguments)[i] for i in written(name)]
    for tensor, value in zip(arguments, before, strict=True):
        tensor.copy_(value)
    op(*expected)
    assert same(got, [expected[i].clone() for i in written(name)]), f"{name}: not as with a clone"
    return True


def main(rounds: int, seed: int) -> None:
    returned = refused = 0
    for name in BUILDERS:
        targets = written(name)
        for i in range(rounds if targets else 0):
            row = Row(name, (1 + i % 2, 2, 3), k=(16, 48)[i // 2 % 2], n=300, bits=(8, 4)[i % 2])
            arguments = list(row.arguments(seed + i))
            for target in targets:
                for other in range(len(arguments)):
                    if other == target or not isinstance(arguments[other], Tensor):
                        continue
                    for made in overlaid(arguments, target, other):
                        done = check(name, made, {other} - set(targets))
                        assert not (done and other in targets), f"{name}: {other} is in {target}"
                        returned, refused = returned + done, refused + (not done)
                expanded = [a.clone() for a in arguments]
                expanded[target] = expanded[target][:1].expand(3, *expanded[target].shape[1:])
                # the other tensors also get three sequences, so that nothing else is wrong
                for j, a in enumerate(expanded):
                    if j != target and a.dim() > 1:
                        expanded[j] = a[:1].repeat(3, *[1] * (a.dim() - 1))
                assert not check(name, expanded, set()), f"{name}: writes an expanded argument"
                refused += 1
    print(f"{returned} returned, {refused} refused")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
