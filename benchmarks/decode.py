"""Decoding with a language model: tokens per second of the prefill and of each step.

SmolLM2-135M, or a larger model of random weights, through transformers' API: `generate` with a
static cache, and its step alone, one call of the model per token. Steps read real text; the search
for the likeliest token is not part of them. Every way has a process of its own and is prepared
once, and all are measured in turn. With one thread the times are processor seconds.
    python -m benchmarks.decode [--model qwen3] [--ways qfx,...] [--context 128,1024]
        [--batch 1,8] [--save]
llama.cpp: npm install --ignore-scripts node-llama-cpp
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks.common import ROOT, Timing, machine, merge
from benchmarks.decode_models import MODELS, text
from benchmarks.decode_parts import NAMES
from benchmarks.decode_peers import PEERS
from benchmarks.decode_static import Case
from benchmarks.decode_ways import EAGER, WAYS
from benchmarks.decode_worker import ANSWER, READING
from qfx.ops.single_tensors import sqnr

NEW = 32
KEY = ("model", "way", "batch", "context", "threads")
Row = dict[str, Any]


class Worker:
    """A way in its process. `reason` says what ended it, before or in a round."""

    def __init__(self, name: str, case: Case, text: Path, threads: int) -> None:
        self.name, self.reason = name, ""
        self.errors, self.logits = text.with_suffix(f".{name}.log"), text.with_suffix(f".{name}.pt")
        given = {"context": case.context, "new": case.new, "threads": threads, "inner": case.inner}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.decode_worker", name]
            + [str(path) for path in (case.folder, text, self.logits)]
            + [f"--{option}={value}" for option, value in given.items()],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors.open("w"),
            text=True,
        )
        self.facts = self._answer()
        self.reason = self.facts.get("reason", self.reason)
        self.rounds: list[Row] = []

    def ask(self, what: str) -> Row:
        """Sends a request and returns the answer, which is empty if the process has ended."""
        assert self.process.stdin is not None
        if self.reason:
            return {}
        print(what, file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Row:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))  # type: ignore[no-any-return]
        said = self.errors.read_text().strip().splitlines()
        self.reason = said[-1] if said else f"The process ended with {self.process.wait()}."
        return {}


def measure(
    names: Sequence[str], case: Case, tokens: Tensor, threads: int, rounds: int
) -> list[Row]:
    """Returns a row for each way with the medians of its rounds; a way that does not run has the
    reason."""
    head = {"batch": case.batch, "context": case.context, "threads": threads, "new": case.new}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        torch.save(tokens, text)
        reading, eager, *others = (
            Worker(n, case, text, threads) for n in dict.fromkeys((READING, EAGER, *names))
        )
        workers = (reading, eager, *others)
        for _ in range(rounds):
            for worker in workers:
                worker.rounds.append(worker.ask("round"))
        parts = {w.name: w.ask("parts") for w in workers}
        for worker in workers:
            worker.process.communicate()
        logits = {w.name: torch.load(w.logits) for w in workers if not w.reason}
    read = median(r["read_gb_s"] for r in reading.rounds)
    rows = []
    for worker in (eager, *others):
        row: Row = {"way": worker.name, **head}
        if worker.reason:
            rows.append({**row, "reason": worker.reason})
            continue
        row |= row_of(worker.rounds, parts[worker.name], case, read)
        if worker is not eager:
            row["logits_sqnr_db"] = round(float(sqnr(logits[EAGER], logits[worker.name])), 1)
        row["prepare_cpu_s"] = round(worker.facts["prepare_cpu_s"], 1)
        rows.append({**row, "read_gb_s": round(read, 2)})
    return rows


def row_of(rounds: list[Row], parts: Row, case: Case, read_gb_s: float) -> Row:
    """Returns a row. `share_of_read`: the fraction of the tokens per second that reading the
    weights alone would allow."""
    step = Timing.of([r["step_s"] for r in rounds])
    step_ms = 1e3 * step.median
    prefill_s = median(r["prefill_s"] for r in rounds)
    row: Row = {
        "prefill_tokens_s": round(case.batch * case.context / prefill_s, 1),
        "step_tokens_s": round(case.batch / step.median, 1),
        "step_ms": round(step_ms, 2),
        "spread": round(step.spread, 3),
        "weights_mb": round(parts["weights_mb"], 1),
        "share_of_read": round(parts["weights_mb"] / read_gb_s / step_ms, 3),
        "peak_mb": round(parts["peak_mb"]),
        "compiled_later": parts["compiled_later"],
        "graph_breaks": parts["graph_breaks"],
    }
    if "cache_mb" in parts:
        row["cache_mb"] = round(parts["cache_mb"], 1)
    if "generate_s" in rounds[0]:
        generate_s = median(r["generate_s"] for r in rounds)
        row["generate_tokens_s"] = round(case.batch / generate_s, 1)
        row["loop_ms"] = round(1e3 * generate_s - step_ms, 2)
    if "shares" in parts:
        row |= {f"{name}_ms": round(parts["shares"][name] * step_ms, 2) for name in NAMES}
    return row


SPEED = ("prefill_tokens_s", "generate_tokens_s", "step_tokens_s", "step_ms", "spread", "loop_ms")
BYTES = ("weights_mb", "cache_mb", "share_of_read", "peak_mb", "logits_sqnr_db", "prepare_cpu_s")
COLUMNS = ("way", *SPEED, *BYTES, *(f"{name}_ms" for name in NAMES))


def report(rows: list[Row]) -> str:
    ran = [row for row in rows if "reason" not in row]
    table = [[row.get(column) for column in COLUMNS] for row in ran]
    heads = [c.replace("_tokens_s", " tokens/s").replace("_", " ") for c in COLUMNS]
    lines = [f"no {row['way']}: {row['reason']}" for row in rows if "reason" in row]
    for row in ran:
        if row["compiled_later"] or row["graph_breaks"]:
            found = f"{row['compiled_later']} graphs after preparing"
            lines.append(f"{row['way']}: {found}, {row['graph_breaks']} graph breaks")
    return "\n".join([tabulate(table, heads), *lines])


def gains(alone: Sequence[Row], together: Sequence[Row]) -> list[str]:
    """Returns, for each way, the gain of a batch in tokens per second over one sequence, and the
    gain that its bytes would allow: weights are read once, a cache for each sequence, each at the
    read bandwidth of its own run."""
    lines = []
    for one, many in product(alone, together):
        if one["way"] == many["way"] and "cache_mb" in one and "cache_mb" in many:
            read = [(r["weights_mb"] + r["cache_mb"]) / r["read_gb_s"] for r in (one, many)]
            allowed = many["batch"] / one["batch"] * read[0] / read[1]
            gain = many["step_tokens_s"] / one["step_tokens_s"]
            lines.append(
                f"{many['way']}: a batch of {many['batch']} has {gain:.2f} times the tokens of "
                f"{one['batch']}, {gain / allowed:.0%} of the {allowed:.2f} that bytes allow"
            )
    return lines


def _numbers(given: str) -> list[int]:
    return [int(number) for number in given.split(",")]


def main() -> None:
    everything = {**WAYS, **PEERS}
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--ways", default=",".join(everything))
    parser.add_argument("--context", type=_numbers, default=[128, 1024, 4096])
    parser.add_argument("--batch", type=_numbers, default=[1, 8])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--new", type=int, default=NEW)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    case = Case(MODELS[options.model](), 1, 0, options.new)
    names = options.ways.split(",")
    if unknown := set(names) - set(everything):
        parser.error(f"unknown {', '.join(unknown)}; there are: {', '.join(everything)}")
    host = machine()
    print(host)
    first: dict[int, list[Row]] = {}  # of the first batch, by context
    for batch in options.batch:
        for context in options.context:
            one = replace(case, batch=batch, context=context)
            tokens = text(case.folder, batch, context + options.new)
            rows = measure(names, one, tokens, options.threads, options.rounds)
            print(
                f"{options.model}, batch {batch}, context {context}",
                report(rows),
                *gains(first.get(context, []), rows),
                sep="\n",
                flush=True,
            )
            first.setdefault(context, rows)
            if options.save:
                added = {"model": options.model, "commit": host["commit"]}
                rows = [{**row, **added} for row in rows]
                print(f"wrote {merge('decode', rows, KEY)}")


if __name__ == "__main__":
    main()
