"""A session: where results are written, the rows so far, the remaining time, and the seconds of
calls."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

Row = dict[str, Any]
Call = Callable[[], object]
WINDOWS, WINDOW_SECONDS = 5, 3e-3  # of which the median counts
MODEL_SECONDS = 0.05


@dataclass
class Session:
    """A run of the benchmarks. `dry`: on CPU tensors of tiny sizes, so that each stage's logic runs
    without a GPU."""

    out: Path
    deadline: float  # of time.monotonic()
    dry: bool = False
    rows: list[Row] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    @property
    def name(self) -> str:
        return "a dry run on the CPU" if self.dry else torch.cuda.get_device_name()

    @property
    def left(self) -> float:
        """The seconds until everything stops."""
        return self.deadline - time.monotonic()

    @property
    def past_l2(self) -> int:
        """The bytes of weights that no cache holds: a call reads them from memory each time."""
        return 2**12 if self.dry else 240 * 2**20

    def size(self, full: int) -> int:
        """Returns an extent of a matrix: as given, or a 64th of it in a dry run."""
        return max(full // 64, min(full, 16)) if self.dry else full

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=self.device)

    def add(self, stage: str, row: Row) -> None:
        """Adds a row and writes it to the file before anything else happens."""
        self.rows.append({"stage": stage, **row})
        with (self.out / "results.jsonl").open("a") as file:
            file.write(json.dumps(self.rows[-1]) + "\n")

    def of(self, stage: str) -> list[Row]:
        return [row for row in self.rows if row["stage"] == stage]

    def run(self, stage: str, rows: Iterator[Row], budget: float) -> None:
        """Adds the rows of a stage until it ends or has used its seconds."""
        if budget < 0:
            return self.add(stage, {"why": "no time was left"})
        start, end = time.monotonic(), time.monotonic() + min(budget, self.left)
        for row in rows:
            self.add(stage, row)
            if time.monotonic() > end:
                self.add(stage, {"cut_after_s": round(budget), "why": "its time was up"})
                break
        print(f"{stage}: {time.monotonic() - start:.0f} s", flush=True)

    def seconds(self, *calls: Call) -> float:
        """Returns the seconds of one call, from replays of a CUDA graph, so that launches do not
        count. `calls` do the same on memory of their own and are used in turn."""
        for call in calls:
            call()
        if self.dry:
            start = time.perf_counter()
            for call in calls:
                call()
            return (time.perf_counter() - start) / len(calls)
        torch.cuda.synchronize()
        once = _replay(_captured(calls)) / len(calls)
        count = max(1, min(2000, round(WINDOW_SECONDS / max(once, 1e-7))))
        graph = _captured([*islice(cycle(calls), count)])
        return median(_replay(graph) for _ in range(WINDOWS)) / count

    def wall_seconds(self, call: Call) -> float:
        """Returns the median wall-clock seconds of one call among many successive ones, including
        launches, for models. A CUDA graph is recorded by the second call."""
        wait: Call = bool if self.dry else torch.cuda.synchronize

        def window(count: int) -> float:
            wait()
            start = time.perf_counter()
            for _ in range(count):
                call()
            wait()
            return (time.perf_counter() - start) / count

        count = max(1, round(MODEL_SECONDS / window(3)))
        return median(window(count) for _ in range(2 if self.dry else 9))


def _captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()  # work that precedes a capture is not on the default one
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3
