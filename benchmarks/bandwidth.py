"""The rate at which this machine reads memory that no cache holds, and weights to compare with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import cycle
from statistics import median
from typing import Any

import torch
from torch import Tensor

SIZE = 4096  # K and N
AT_ONCE = 4  # weights of a sample, 64 MB
OPS = torch.ops.qfx


def weights(megabytes: int) -> list[Tensor]:
    """Returns packed weights of `megabytes` in total."""
    codes = torch.randint(-127, 128, (SIZE, SIZE), dtype=torch.int8)
    one = OPS.pack_weight(codes, torch.rand(SIZE))
    return [one.clone() for _ in range(max(1, megabytes * 2**20 // SIZE**2))]


def rate(run: Callable[[Tensor], Any], turn: Iterator[Tensor]) -> float:
    """Returns the GB/s of weights over AT_ONCE calls, by the clock of this thread, which a busy
    machine disturbs less."""
    taken = [next(turn) for _ in range(AT_ONCE)]
    start = time.thread_time()
    for w in taken:
        run(w)
    return AT_ONCE * SIZE**2 / (time.thread_time() - start) / 1e9


def readers() -> dict[str, Callable[[Tensor], Any]]:
    """Returns ways to read the same bytes."""
    return {
        "float32": lambda w: w[: SIZE**2].view(torch.float32).sum(),
        "int64": lambda w: w[: SIZE**2].view(torch.int64).sum(),
    }


@lru_cache
def read_rate(megabytes: int, rounds: int = 9) -> float:
    """Returns the GB/s of the faster reader, the median of `rounds`."""
    turn = cycle(weights(megabytes))
    return max(median(rate(run, turn) for _ in range(rounds)) for run in readers().values())
