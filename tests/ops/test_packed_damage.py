"""Packed weights that were damaged: which uses of them are refused (docs/kernels.md)."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import qfx
from qfx.ops.code import Code
from qfx.ops.header import HEADER_BYTES
from qfx.ops.layout import Layout

N, K, ROUNDS = 64, 128, 50
CODES = torch.randint(-8, 8, (N, K), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
SCALE, X = torch.ones(N), torch.ones(1, K)


def damaged(packed: Tensor, draw: random.Random) -> Tensor:
    """A bit of what is behind the header is another one."""
    packed.view(torch.uint8)[draw.randrange(HEADER_BYTES, packed.numel())] ^= 1 << draw.randrange(8)
    return packed


def is_used(packed: Tensor) -> bool:
    """By an operator that reads what a first use has found."""
    try:
        torch.ops.qfx.linear_dynamic(X, packed, Layout(N), None, Code(), "none", torch.float32)
    except RuntimeError as error:
        assert "it is damaged: its contents are not those that were packed" in str(error)
        return False
    return True


@pytest.fixture
def draw() -> random.Random:
    return random.Random(0)


def packed() -> Tensor:
    found: Tensor = torch.ops.qfx.pack_weight(CODES, SCALE)
    return found


def test_a_damaged_copy_where_a_packed_weight_was_freed_is_refused(draw: random.Random) -> None:
    """The allocator gives the copy the memory of the weight."""
    addresses, used = set(), 0
    for _ in range(ROUNDS):
        whole = packed()
        assert is_used(whole)
        addresses.add(whole.data_ptr())
        values = whole.tolist()
        del whole
        copy = torch.tensor(values, dtype=torch.int8)
        addresses.add(copy.data_ptr())
        used += is_used(damaged(copy, draw))
    assert used == 0 and len(addresses) < 2 * ROUNDS


def in_place(draw: random.Random) -> Tensor:
    whole = packed()
    assert is_used(whole)
    return damaged(whole, draw)


def in_place_before_the_first_use(draw: random.Random) -> Tensor:
    return damaged(packed(), draw)


def of_a_copy(draw: random.Random) -> Tensor:
    """In the memory of PyTorch's allocator, where a whole one was read."""
    whole = packed().clone()
    assert is_used(whole)
    values = whole.tolist()
    del whole
    return damaged(torch.tensor(values, dtype=torch.int8), draw)


def copied_over(draw: random.Random) -> Tensor:
    whole = packed().clone()
    assert is_used(whole)
    return whole.copy_(damaged(whole.clone(), draw))


def set_to_another(draw: random.Random) -> Tensor:
    whole = packed()
    assert is_used(whole)
    other: Any = damaged(packed(), draw)
    return whole.set_(other)


LATER = [in_place, in_place_before_the_first_use, of_a_copy, copied_over, set_to_another]


@pytest.mark.parametrize("damage", LATER)
def test_after_invalidate_damaged_memory_is_refused(
    damage: Callable[[random.Random], Tensor], draw: random.Random
) -> None:
    for _ in range(ROUNDS):
        found = damage(draw)
        qfx.invalidate()
        assert not is_used(found)
    whole = packed()
    qfx.invalidate()
    assert is_used(whole)


def test_after_invalidate_other_threads_read_again(draw: random.Random) -> None:
    """A thread that used the weight before knows it by itself."""
    whole, go, done = packed(), threading.Event(), threading.Event()
    seen: list[bool] = []

    def use() -> None:
        seen.append(is_used(whole))
        done.set()
        go.wait()
        seen.append(is_used(whole))

    thread = threading.Thread(target=use)
    thread.start()
    done.wait()
    damaged(whole, draw)
    qfx.invalidate()
    go.set()
    thread.join()
    assert seen == [True, False]
