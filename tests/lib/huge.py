"""Calls every operator on huge shapes without elements, in a process of its own, because a loop
over such a number of rows does not end.

Prints a line before each call, and its outcome. A call that returns must have the shapes of the
fake implementation; a call that raises must say how much memory it requested, or which limit
applies.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

import qfx  # noqa: F401
from qfx.values.scheme import PER_ROW, PER_TENSOR
from tests.lib.rows import BUILDERS, Row

HUGE = 2**40
SHAPES = [  # leading axes, K, N
    ((HUGE,), 0, 0),
    ((HUGE,), 0, 5),
    ((HUGE, 0), 0, 0),
    ((HUGE, 0), 4, 3),
    ((HUGE, 3), 0, 0),
    ((0, HUGE), 4, 3),
    ((3, HUGE), 0, 0),
    ((0,), 0, HUGE),
    ((2, 0), 0, HUGE),
    ((2, 3), 0, HUGE),
]


def rows() -> Iterator[Row]:
    for op in BUILDERS:
        for leading, k, n in SHAPES:
            for axes in (PER_TENSOR, PER_ROW):
                yield Row(op, leading, k, n, axes=axes, symmetric=True, bias=False)


def shapes(result: Any) -> list[torch.Size]:
    return [t.shape for t in tree_leaves(result) if isinstance(t, Tensor)]


def outcome(row: Row) -> str:
    try:
        arguments = row.arguments()
    except RuntimeError:
        return "no such operands"
    op = getattr(torch.ops.qfx, row.op)
    with FakeTensorMode() as mode:
        faked = tree_map(lambda a: mode.from_tensor(a) if isinstance(a, Tensor) else a, arguments)
        wanted = shapes(op(*faked))
    try:
        found = shapes(op(*arguments))
    except RuntimeError as why:
        said = ": out of memory. It asked for ", f": N={HUGE} ", f"its header says N={HUGE} "
        said += (": code has one scale for all rows, expected one for each",)
        assert any(phrase in str(why) for phrase in said), why
        return "too large"
    assert found == wanted, (found, wanted)
    return "returned"


if __name__ == "__main__":
    for row in rows():
        print(row, end=" ", flush=True)
        print(outcome(row), flush=True)
    sys.exit()
