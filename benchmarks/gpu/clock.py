"""Seconds of calls on a GPU, measured by replaying a CUDA graph, so that launches do not count.

On the CPU, for dry runs, the calls run in a loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from statistics import median

import torch

Call = Callable[[], object]
WINDOWS = 5  # of which the median counts
WINDOW_SECONDS = 3e-3
MODEL_SECONDS = 0.05


def seconds(calls: Sequence[Call], device: torch.device) -> float:
    """Returns the seconds of one call. `calls` do the same on memory of their own and are used in
    turn."""
    if device.type == "cpu":
        return _on_cpu(calls)
    for call in calls:
        call()
    torch.cuda.synchronize()
    once = _replays(_captured(calls), 1) / len(calls)
    count = max(1, min(2000, round(WINDOW_SECONDS / max(once, 1e-7))))
    graph = _captured([*islice(cycle(calls), count)])
    return median(_replays(graph, 1) for _ in range(WINDOWS)) / count


@contextmanager
def eager_stream() -> Iterator[None]:
    """Switches to a stream other than the default one, as required for work that precedes a
    capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def _captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    with eager_stream():
        calls[0]()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _replays(graph: torch.cuda.CUDAGraph, count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(count):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / count


def _on_cpu(calls: Sequence[Call]) -> float:
    calls[0]()
    start = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - start) / len(calls)


def wall_seconds(call: Call, device: torch.device, windows: int = WINDOWS) -> float:
    """Returns the median wall-clock seconds of one call among many successive ones, including
    launches, for models. A CUDA graph is recorded by the second call."""
    wait = torch.cuda.synchronize if device.type == "cuda" else bool

    def window(count: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(count):
            call()
        wait()
        return (time.perf_counter() - start) / count

    count = max(1, round(MODEL_SECONDS / window(3)))
    return median(window(count) for _ in range(windows))
