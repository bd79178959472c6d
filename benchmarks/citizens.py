"""Libraries as a user of transformers meets them: the lines typed with qfx and its peers, and their
outcome.

SmolLM2-135M is quantized, saved, loaded, made to write 32 tokens, fine-tuned by LoRA and merged,
each task in a fresh process on one thread. A library that is not installed has a row that says so.
    python -m benchmarks.citizens [--libraries qfx,...] [--save]
The peers: pip install --no-deps torchao optimum-quanto optimum bitsandbytes ninja
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks import common, lora
from benchmarks.citizen_tasks import TASKS, Work, failed, outcome, typed_lines
from benchmarks.fresh import FailedError, in_a_process
from benchmarks.peer import missing
from benchmarks.typed import FLOAT, LIBRARIES

NEW_TOKENS, PROMPT, STEPS = 32, 64, 5
Row = dict[str, Any]
KNOWN = ("library", "task", "lines", "outcome", "said", "reason")
COLUMNS: dict[str, Callable[[Row], Any]] = {
    "library": lambda row: row["library"],
    "task": lambda row: row["task"],
    "lines": lambda row: row["lines"],
    "outcome": lambda row: row.get("outcome", "not run"),
    "figures": lambda row: ", ".join(f"{k} {v}" for k, v in row.items() if k not in KNOWN),
    "said": lambda row: row.get("said") or row.get("reason"),
}


def prepare(work: Work, batch: Tensor) -> None:
    """Writes the tokens of all tasks: `batch` [B, L], and the start of its first row as the
    prompt."""
    tokens = {"batch": batch, "prompt": batch[:1, :PROMPT].clone()}
    torch.save(tokens, work.folder / "tokens.pt")


def rows(name: str, work: Work, run: Callable[[str, str, Work], Row]) -> list[Row]:
    """Returns a row of the library for each task, with the outcome of `run(library, task,
    work)`."""
    lacking = missing(LIBRARIES[name].packages)
    return [
        {
            "library": name,
            "task": task,
            "lines": typed_lines(name, task),
            **({"reason": lacking} if lacking else run(name, task, work)),
        }
        for task in TASKS
    ]


def chosen(names: str) -> list[str]:
    """Returns the libraries with float32 first, whose results are the reference for the others."""
    found = list(dict.fromkeys((FLOAT, *names.split(","))))
    if unknown := [name for name in found if name not in LIBRARIES]:
        raise SystemExit(f"{', '.join(unknown)}: not one of {', '.join(LIBRARIES)}")
    return found


def apart(library: str, task: str, work: Work) -> Row:
    """Runs a task in a fresh process."""
    places = ("--model", str(work.model), "--folder", str(work.folder))
    counts = ("--new-tokens", str(work.new_tokens), "--steps", str(work.steps))
    one = ("--one", library, "--task", task)
    try:
        return in_a_process("benchmarks.citizens", *one, *places, *counts)
    except FailedError as why:
        return failed(str(why))


def report(found: Sequence[Row]) -> str:
    """Returns the table of one library."""
    return tabulate([[figure(row) for figure in COLUMNS.values()] for row in found], list(COLUMNS))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--libraries", default=",".join(LIBRARIES))
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    for own in ("--one", "--task", "--model", "--folder"):
        parser.add_argument(own, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts = (options.new_tokens, options.steps)
    if options.one:
        work = Work(Path(options.model), Path(options.folder), *counts)
        print(json.dumps(outcome(options.one, options.task, work)))
        return
    host = common.machine()
    with tempfile.TemporaryDirectory() as folder:
        model, batch = lora.tokens()
        work = Work(model, Path(folder), *counts)
        prepare(work, batch)
        print(host)
        for name in chosen(options.libraries):
            found = rows(name, work, apart)
            print(report(found), flush=True)
            if options.save:
                saved = [{**row, "threads": 1, "commit": host["commit"]} for row in found]
                print(f"wrote {common.merge('citizens', saved, ('library', 'task', 'threads'))}")


if __name__ == "__main__":
    main()
