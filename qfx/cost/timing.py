"""Times several calls in turns, so that a drift of the machine's speed affects them alike.

With one thread the thread's own processor time counts, which excludes what other processes take of
the core. Several threads wait for each other, so wall-clock time counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")
ROUNDS = 5
MOST = 2e-3  # seconds after which a call is not repeated
FEWEST = 3  # runs that are made all the same


def fastest(*calls: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    """Returns the least seconds of each call, run in turns: the time of a call that nothing
    disturbs."""
    return [min(times) for times in in_turns(*calls, rounds=rounds)]


def medians(*calls: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    """Returns the median seconds of each call, run in turns."""
    return [sorted(times)[rounds // 2] for times in in_turns(*calls, rounds=rounds)]


def in_turns(*calls: Callable[[], object], rounds: int) -> list[tuple[float, ...]]:
    """Returns the seconds of each call in each round; short calls are repeated within a round."""
    once = [_seconds(c, 1) for c in calls]
    repeats = [max(1, min(200, int(2e-4 / max(s, 1e-7)))) for s in once]
    each = [*zip(calls, repeats, strict=True)]
    first = [s if r == 1 else _seconds(c, r) for s, (c, r) in zip(once, each, strict=True)]
    times = [first, *([_seconds(c, r) for c, r in each] for _ in range(rounds - 1))]
    return list(zip(*times, strict=True))


def timed(call: Callable[[], Result]) -> tuple[Result, float]:
    """Returns the result of one call and its seconds, for calls too long to be repeated."""
    clock, wait = _clock()
    wait()
    start = clock()
    result = call()
    wait()
    return result, max(clock() - start, 1e-9)


def _seconds(call: Callable[[], object], repeats: int) -> float:
    """Returns the seconds of one call: the least mean of a few runs of several calls, since a busy
    machine may take the cores of several threads away for longer than a call takes."""
    call()  # brings back to the caches what the others evicted
    clock, wait = _clock()
    wait()
    least, done, runs, spent = float("inf"), 0, 0, 0.0
    while done < repeats and (spent < MOST or runs < FEWEST):
        count = max(1, min(done, repeats - done))
        start = clock()
        for _ in range(count):
            call()
        wait()
        seconds = clock() - start
        least, spent = min(least, seconds / count), spent + seconds
        done, runs = done + count, runs + 1
    return max(least, 1e-9)


def _clock() -> tuple[Callable[[], float], Callable[[], object]]:
    on_gpu = torch.cuda.is_initialized()
    alone = torch.get_num_threads() == 1 and not on_gpu
    return (
        time.thread_time if alone else time.perf_counter,
        torch.cuda.synchronize if on_gpu else bool,
    )
