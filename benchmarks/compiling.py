"""The cost of starting: CPU seconds of compiling BERT-base and calling it once.

Each sample is a fresh process with an empty Inductor cache. qfx is measured without and with its
cost table on disk, which one process measures for all later ones, and with programs in the place of
Inductor.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

import qfx
from benchmarks.common import cpu_seconds
from benchmarks.fresh import call
from benchmarks.question import Question, Row
from benchmarks.subjects import TABLE

MODEL = "bert-1x128"
FLOAT, COLD, KEPT = "float32 Inductor", "qfx, no cost table", "qfx, cost table kept"
PROGRAM = "qfx, inner=program, cost table kept"
BACKENDS: dict[str, str | Callable[..., Any]] = {
    FLOAT: "inductor",
    COLD: qfx.backend,
    KEPT: qfx.backend,  # after COLD, whose table it finds, as the next does
    PROGRAM: partial(qfx.backend, options={"inner": "program"}),
}
Sample = dict[str, float]


def first_call(candidate: str) -> Sample:
    """Returns the seconds from `torch.compile` to the end of the first call, including those of
    compilers."""
    model, inputs = TABLE[MODEL].build()
    cpu, wall = cpu_seconds(), time.perf_counter()
    with torch.no_grad():
        torch.compile(model, backend=BACKENDS[candidate])(*inputs)
    return {"cpu_s": cpu_seconds() - cpu, "wall_s": time.perf_counter() - wall}


def one_round() -> dict[str, Sample]:
    found = {}
    with TemporaryDirectory() as cost_tables:
        for name in BACKENDS:
            with TemporaryDirectory() as empty:
                caches = {"TORCHINDUCTOR_CACHE_DIR": empty, "XDG_CACHE_HOME": cost_tables}
                found[name] = call(first_call, name, environment=caches)
    return found


def medians(rounds: list[dict[str, Sample]]) -> list[Row]:
    """Returns medians, and the ratio of CPU seconds to those of float32 Inductor."""
    rows: list[Row] = [
        {"model": MODEL, "candidate": name}
        | {part: round(median(r[name][part] for r in rounds), 2) for part in ("cpu_s", "wall_s")}
        for name in BACKENDS
    ]
    return [{**row, "ratio": round(row["cpu_s"] / rows[0]["cpu_s"], 3)} for row in rows]


def tables(options: Namespace) -> Iterator[list[Row]]:
    yield medians([one_round() for _ in range(options.rounds)])


QUESTION = Question(
    "How long does compiling a model take?", tables, key=("model", "candidate"), rounds=3
)
