"""Timing: calls in turns, so that a drift of the machine's speed meets them alike.

With one thread it is the thread's own time that counts: what another process takes of the core is
not in it. Several threads wait for each other, so theirs is the time on the wall.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")
ROUNDS = 5


def fastest(*calls: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    """Least seconds of each call, in turns: what it takes when nothing else disturbs it."""
    return [min(times) for times in in_turns(*calls, rounds=rounds)]


def medians(*calls: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    """Median seconds of each call, in turns."""
    return [sorted(times)[rounds // 2] for times in in_turns(*calls, rounds=rounds)]


def in_turns(*calls: Callable[[], object], rounds: int) -> list[tuple[float, ...]]:
    """Seconds of each call in each round; short calls are repeated within a round."""
    repeats = [max(1, min(200, int(2e-4 / max(_seconds(c, 1), 1e-7)))) for c in calls]
    times = [[_seconds(c, r) for c, r in zip(calls, repeats, strict=True)] for _ in range(rounds)]
    return list(zip(*times, strict=True))


def timed(call: Callable[[], Result]) -> tuple[Result, float]:
    """What one call returns, and its seconds: for calls that are too long to be repeated."""
    on_gpu = torch.cuda.is_initialized()
    alone = torch.get_num_threads() == 1 and not on_gpu
    wait = torch.cuda.synchronize if on_gpu else bool
    clock = time.thread_time if alone else time.perf_counter
    wait()
    start = clock()
    result = call()
    wait()
    return result, max(clock() - start, 1e-9)


def _seconds(call: Callable[[], object], repeats: int) -> float:
    call()  # brings back to the caches what the others drove out

    def several() -> None:
        for _ in range(repeats):
            call()

    _, seconds = timed(several)
    return max(seconds / repeats, 1e-9)
