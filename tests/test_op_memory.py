"""No operator keeps memory of a call: glibc counts what is allocated."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.rows import Row
from tests.test_op_parts import OPS

CALLS = 500
SMALLEST = 32  # bytes of malloc's smallest chunk: what one lost allocation a call would add
FIELDS = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
    "keepcost",
)  # fmt: skip


class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


def allocated() -> int:
    """Bytes that malloc has handed out."""
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        pytest.skip("counts with mallinfo2 of glibc 2.33 or later")
    mallinfo.restype = Mallinfo
    return int(mallinfo().uordblks)


@pytest.mark.parametrize("name", OPS)
def test_keeps_nothing(name: str) -> None:
    op, arguments = getattr(torch.ops.qfx, name).default, Row(name).arguments()
    for _ in range(CALLS):
        op(*arguments)  # fills what threads and Python keep between calls
    before = allocated()
    for _ in range(CALLS):
        op(*arguments)
    assert allocated() - before < CALLS * SMALLEST / 2


def test_lost_memory_is_seen() -> None:
    before = allocated()
    kept = [torch.empty(1) for _ in range(CALLS)]
    assert allocated() - before >= len(kept) * SMALLEST
