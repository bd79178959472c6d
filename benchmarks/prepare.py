"""The cost of starting: CPU seconds of compiling BERT-base and calling it once.

Each sample is a fresh process with an empty Inductor cache. qfx is measured without and with its
cost table on disk, which one process measures for all later ones.
    python -m benchmarks.prepare [--rounds 3] [--save]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tabulate import tabulate

import qfx
from benchmarks.common import ROOT, cpu_seconds, machine, save
from benchmarks.subjects import TABLE

MODEL = "bert-1x128"
FLOAT, COLD, KEPT = "float32 Inductor", "qfx, no cost table", "qfx, cost table kept"
BACKENDS: dict[str, str | Callable[..., Any]] = {
    FLOAT: "inductor",
    COLD: qfx.backend,
    KEPT: qfx.backend,  # after COLD, whose table it finds
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


def in_a_process(candidate: str, threads: int, cost_tables: Path) -> Sample:
    command = [sys.executable, "-m", "benchmarks.prepare", "--one", candidate]
    with TemporaryDirectory() as empty:
        caches = {"TORCHINDUCTOR_CACHE_DIR": empty, "XDG_CACHE_HOME": str(cost_tables)}
        done = subprocess.run(
            [*command, "--threads", str(threads)],
            cwd=ROOT,
            env={**os.environ, **caches},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def one_round(threads: int) -> dict[str, Sample]:
    with TemporaryDirectory() as cost_tables:
        return {name: in_a_process(name, threads, Path(cost_tables)) for name in BACKENDS}


def rows(rounds: list[dict[str, Sample]], threads: int) -> list[dict[str, Any]]:
    """Returns medians, and the ratio of CPU seconds to those of float32 Inductor."""
    cpu, wall = (
        {name: median(r[name][part] for r in rounds) for name in BACKENDS}
        for part in ("cpu_s", "wall_s")
    )
    return [
        {
            "model": MODEL,
            "candidate": name,
            "threads": threads,
            "cpu_s": round(cpu[name], 2),
            "wall_s": round(wall[name], 2),
            "ratio": round(cpu[name] / cpu[FLOAT], 3),
        }
        for name in BACKENDS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    parser.add_argument("--one", choices=BACKENDS, help="only this one, in this process")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.one:
        print(json.dumps(first_call(options.one)))
        return
    found = rows([one_round(options.threads) for _ in range(options.rounds)], options.threads)
    print(machine())
    print(tabulate(found, headers="keys"))
    if options.save:
        print(f"wrote {save('prepare', found)}")


if __name__ == "__main__":
    main()
