"""Seconds from a loaded model to the first token of `generate`, and to the end of a few.

SmolLM2-135M, each way in a fresh process that compiles: once with an empty folder for everything
stored on disk (Inductor's code, the cost tables and programs of qfx), and once with the files of
that process. `made_s`: seconds until a decoder exists, compiled or not.
    python -m benchmarks.first_token [--ways qfx,...] [--rounds 3] [--threads 1] [--save]
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor
from torch._dynamo.utils import counters

from benchmarks import decode_ways
from benchmarks.common import cpu_seconds, machine, merge
from benchmarks.decode_models import MODELS, text
from benchmarks.decode_static import Case, Counted, Static, load
from benchmarks.decode_ways import EAGER, Way
from benchmarks.fresh import FailedError, in_a_process
from benchmarks.regions import each_layer, nested

CONTEXT, NEW, LENGTH = 128, 8, 1024  # tokens: of the prompt, new ones, of the cache
EMPTY, FILLED = "empty", "filled"
KEY = ("way", "cache", "threads")
Row = dict[str, Any]


def by_generate(case: Case, model: Any) -> Static:
    """Compiles what transformers itself compiles on other devices: the step, and not the
    prefill."""
    from transformers import CompileConfig

    config: Any = CompileConfig(backend=case.inner, fullgraph=False)
    config._compile_all_devices = True
    model.generation_config.compile_config = config
    return Static(case, model)


WAYS: dict[str, Way] = {
    EAGER: decode_ways.WAYS[EAGER],
    "float32 Inductor by generate": Way(by_generate),
    "float32 Inductor": decode_ways.WAYS["float32 Inductor"],
    "qfx generate w8a8": decode_ways.WAYS["qfx generate w8a8"],
    "qfx generate w4a8": decode_ways.WAYS["qfx generate w4a8"],
    "qfx": decode_ways.WAYS["qfx"],
    "qfx w8a8": decode_ways.WAYS["qfx w8a8"],
    "qfx quantize_ by Inductor": decode_ways.WAYS["qfx quantize_ by Inductor"],
    "float32 Inductor nested": Way(partial(nested, "inductor")),
    "float32 Inductor each layer": Way(partial(each_layer, "inductor")),
    "qfx w8a8 nested": Way(partial(nested, "qfx")),
    "qfx w8a8 each layer": Way(partial(each_layer, "qfx")),
}


def first(way: Way, case: Case, tokens: Tensor) -> Row:
    """Returns figures of this process: wall-clock seconds and processor seconds, including those of
    compilers."""
    model = load(case)
    found: Row = {}
    wall, cpu = time.perf_counter(), cpu_seconds()

    def look(count: int) -> None:
        if count in (1, case.new):
            name = "first" if count == 1 else "all"
            found[f"{name}_s"] = time.perf_counter() - wall
            found[f"{name}_cpu_s"] = cpu_seconds() - cpu

    decoder: Any = way.make(case, model)
    found["made_s"] = time.perf_counter() - wall
    decoder.generate(tokens, case.new, streamer=Counted(look))
    return {**found, "graphs": int(counters["stats"]["unique_graphs"])}


def one(name: str, folder: Path, tokens: Path, threads: int) -> Row:
    torch.set_num_threads(threads)
    with torch.no_grad():
        return first(WAYS[name], Case(folder, 1, LENGTH - NEW - 1, NEW), torch.load(tokens))


def one_round(name: str, folder: Path, told: Tensor, threads: int) -> dict[str, Row]:
    """Runs a round. `told`: a prompt [1, L]. It is passed as a file, because texts are in a cache
    folder too."""
    with TemporaryDirectory() as kept:
        torch.save(told, tokens := f"{kept}/tokens")
        places = {"TORCHINDUCTOR_CACHE_DIR": f"{kept}/inductor", "XDG_CACHE_HOME": f"{kept}/xdg"}
        places["QFX_PROGRAM_CACHE"] = f"{kept}/programs"
        run = partial(in_a_process, "benchmarks.first_token", environment=places)
        return {
            cache: run("--one", name, str(folder), tokens, f"--threads={threads}")
            for cache in (EMPTY, FILLED)
        }


def rows(name: str, folder: Path, told: Tensor, threads: int, rounds: int) -> list[Row]:
    """Returns two rows, of medians, or one with the reason if the way does not run."""
    head = {"way": name, "threads": threads}
    try:
        found = [one_round(name, folder, told, threads) for _ in range(rounds)]
    except FailedError as why:
        return [{**head, "cache": EMPTY, "reason": str(why)}]
    return [
        {**head, "cache": cache}
        | {key: round(median(r[cache][key] for r in found), 2) for key in found[0][cache]}
        for cache in (EMPTY, FILLED)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    parser.add_argument("--one", nargs=3, help="only this way, of a folder and a file of tokens")
    options = parser.parse_args()
    if options.one:
        name, folder, tokens = options.one
        print(json.dumps(one(name, Path(folder), Path(tokens), options.threads)))
        return
    names = options.ways.split(",")
    if unknown := set(names) - set(WAYS):
        parser.error(f"unknown {', '.join(unknown)}; there are: {', '.join(WAYS)}")
    host, folder = machine(), MODELS["smollm2"]()
    told = text(folder, 1, CONTEXT)
    found = [r for n in names for r in rows(n, folder, told, options.threads, options.rounds)]
    found = [{**row, "commit": host["commit"]} for row in found]
    print(host)
    print(tabulate(found, headers="keys"))
    if options.save:
        print(f"wrote {merge('first-token', found, KEY)}")


if __name__ == "__main__":
    main()
