"""Operands for timing the cells of a cost table, and a context without the caller's modes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import torch

from qfx.cost.grid import Check, seconds
from qfx.host.tensors import without_modes

Timing = Callable[[int], Sequence[float]]  # maps M to seconds in float and in int8
Column = Callable[[int, int, torch.dtype], Timing]  # maps K and N to a Timing
LARGEST = 2**28  # multiply-adds of the largest cell that is timed
ROUNDS = 2  # timings of each cell
FAR = 64 << 20  # bytes that no cache near the processor holds
MATRICES = 128  # the number of weights that a model reads between two uses of one


class Extra(NamedTuple):
    """Numbers stored beside the grids: the function that measures them, their number, and the
    function that checks each."""

    measured: Callable[[torch.dtype], Iterable[float]]
    size: int
    check: Check = seconds


@contextmanager
def undisturbed() -> Iterator[None]:
    """Turns off gradients, the caller's autocast, modes such as Dynamo's, and inference mode, which
    would make operators skip a dispatch that compiled graphs go through.
    """
    modes_off = without_modes()
    autocast_off = torch.autocast("cpu", enabled=False)
    with torch.inference_mode(False), torch.no_grad(), autocast_off, modes_off:
        try:
            yield
        finally:
            _room.cache_clear()


@lru_cache(maxsize=2)
def _room(dtype: torch.dtype) -> torch.Tensor:
    """Returns FAR bytes of memory: random numbers for float dtypes, uninitialized integers
    otherwise. `undisturbed` frees it at its end."""
    count = FAR // dtype.itemsize
    return (
        random(1, count, dtype).view(-1)
        if dtype.is_floating_point
        else torch.empty(count, dtype=dtype, device="cpu")
    )


def _in_turn(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns memory [matrices, count] for several weights. Weights that are used in turn are read
    from the same place as a model's weights: from memory if they are large, from a cache if all
    weights of a model fit into it."""
    room = _room(dtype)
    matrices = min(max(room.numel() // max(count, 1), 1), MATRICES)
    if matrices * count > room.numel():
        return random(1, count, dtype) if dtype.is_floating_point else room.new_empty(1, count)
    return room[: matrices * count].view(matrices, count)


def weights(n: int, k: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns several matrices [n, k] to be used in turn, so that they are read like the weights of
    a model."""
    return list(_in_turn(n * k, dtype).view(-1, n, k))


def apart(codes: torch.Tensor) -> list[torch.Tensor]:
    """Returns several copies of a packed weight to be used in turn, so that they are read like the
    weights of a model."""
    return list(_in_turn(codes.numel(), codes.dtype).copy_(codes))


def random(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns a matrix [rows, columns] of random numbers; large matrices repeat the same
    numbers."""
    generator = torch.Generator().manual_seed(0)  # the user's random state is left alone
    count = min(rows * columns, 2**18)
    numbers = torch.randn(count, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
    return numbers.repeat(-(-rows * columns // len(numbers)))[: rows * columns].view(rows, columns)
