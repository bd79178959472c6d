"""Seconds from a loaded model to the first token of `generate`, and to the end of a few.

SmolLM2-135M, each way in a fresh process that compiles: once with an empty folder for everything
stored on disk (Inductor's code, the cost tables and programs of qfx), and once with the files of
that process. `made_s`: seconds until a decoder exists, compiled or not.
    python -m benchmarks first_token [--ways 'qfx w8a8,...'] [--rounds 3] [--threads 1] [--save]
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from benchmarks import decode_ways
from benchmarks.common import cpu_seconds
from benchmarks.decode_models import MODELS, text
from benchmarks.decode_ways import Case, Static, Way, load
from benchmarks.fresh import FailedError, call
from benchmarks.question import Question, Row, chosen

CONTEXT, NEW, LENGTH = 128, 8, 1024  # tokens: of the prompt, new ones, of the cache
EMPTY, FILLED = "empty", "filled"
KEY = ("way", "cache")


class Counted:
    """A streamer of `generate` that notes the seconds until each token: elapsed ones, and
    processor seconds with those of compilers."""

    def __init__(self) -> None:
        self.start, self.seconds = (time.perf_counter(), cpu_seconds()), list[tuple[float, float]]()

    def put(self, _: Tensor) -> None:  # the first that it is given is the prompt
        wall, cpu = self.start
        self.seconds.append((time.perf_counter() - wall, cpu_seconds() - cpu))

    def end(self) -> None:
        pass


def by_generate(case: Case, model: Any) -> Static:
    """Compiles what transformers itself compiles on other devices: the step, and not the
    prefill."""
    from transformers import CompileConfig

    config: Any = CompileConfig(backend=case.inner, fullgraph=False)
    config._compile_all_devices = True
    model.generation_config.compile_config = config
    return Static(case, model)


KEPT = ("float32 eager", "float32 Inductor", "qfx generate w8a8", "qfx generate w4a8", "qfx w8a8",
        "qfx quantize_ by Inductor")  # fmt: skip
WAYS: dict[str, Way] = {
    **{name: decode_ways.WAYS[name] for name in KEPT},
    "float32 Inductor by generate": Way(by_generate),
}


def first(way: Way, case: Case, tokens: Tensor) -> Row:
    """Returns figures of this process."""
    model = load(case)
    streamer = Counted()
    decoder: Any = way.make(case, model)
    found = {"made_s": time.perf_counter() - streamer.start[0]}
    decoder.generate(tokens, case.new, streamer=streamer)
    for name, (wall, cpu) in {"first": streamer.seconds[1], "all": streamer.seconds[-1]}.items():
        found |= {f"{name}_s": wall, f"{name}_cpu_s": cpu}
    return {**found, "graphs": int(counters["stats"]["unique_graphs"])}


def one(name: str, folder: str, tokens: list[list[int]]) -> Row:
    with torch.no_grad():
        case = Case(Path(folder), 1, LENGTH - NEW - 1, NEW)
        return first(WAYS[name], case, torch.tensor(tokens))


def one_round(name: str, folder: Path, told: Tensor) -> dict[str, Row]:
    """Runs a round. `told`: a prompt [1, L]."""
    with TemporaryDirectory() as kept:
        places = {"TORCHINDUCTOR_CACHE_DIR": f"{kept}/inductor", "XDG_CACHE_HOME": f"{kept}/xdg"}
        places["QFX_PROGRAM_CACHE"] = f"{kept}/programs"
        run = partial(call, one, name, str(folder), told.tolist(), environment=places)
        return {cache: run() for cache in (EMPTY, FILLED)}


def rows(name: str, folder: Path, told: Tensor, rounds: int) -> list[Row]:
    """Returns two rows, of medians, or one with the reason if the way does not run."""
    try:
        found = [one_round(name, folder, told) for _ in range(rounds)]
    except FailedError as why:
        return [{"way": name, "cache": EMPTY, "reason": str(why)}]
    return [
        {"way": name, "cache": cache}
        | {key: round(median(r[cache][key] for r in found), 2) for key in found[0][cache]}
        for cache in (EMPTY, FILLED)
    ]


def tables(options: Namespace) -> Iterator[list[Row]]:
    """Yields the rows of each way."""
    folder = MODELS["smollm2"]()
    prompt = text(folder, 1, CONTEXT)
    for name in chosen(options.ways, WAYS):
        yield rows(name, folder, prompt, options.rounds)


QUESTION = Question(
    "How long does `generate` take from a loaded model to its first token?",
    tables,
    KEY,
    {"ways": [*WAYS]},
    rounds=3,
)
