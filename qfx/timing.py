"""Timing: calls in turns, so that a drift of the machine's speed meets them alike."""

from __future__ import annotations

import time
from collections.abc import Callable

ROUNDS = 5


def fastest(*calls: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    """Least seconds of each call, in turns: what it takes when nothing else disturbs it."""
    return [min(times) for times in in_turns(*calls, rounds=rounds)]


def medians(*calls: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    """Median seconds of each call, in turns."""
    return [sorted(times)[rounds // 2] for times in in_turns(*calls, rounds=rounds)]


def in_turns(*calls: Callable[[], object], rounds: int) -> list[tuple[float, ...]]:
    """Seconds of each call in each round; short calls are repeated within a round."""
    repeats = []
    for call in calls:
        call()
        once = _seconds(call, 1)
        repeats.append(max(1, min(200, int(2e-4 / max(once, 1e-7)))))
    times = [[_seconds(c, r) for c, r in zip(calls, repeats, strict=True)] for _ in range(rounds)]
    return list(zip(*times, strict=True))


def _seconds(call: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return max((time.perf_counter() - start) / repeats, 1e-9)
