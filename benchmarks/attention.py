"""int8_attention: time and error on every instruction set of this machine, against
F.scaled_dot_product_attention in float32, and against another build of qfx.

All take turns. With one thread the times are processor seconds, so that other processes matter
less. Errors are those of the outputs of queries that see none of the enlarged keys.
    python -m benchmarks.attention [--threads 1] [--only 512,MiniLM] [--beside CHECKOUT] [--save]
    python -m benchmarks.attention --errors [--models] [--beside CHECKOUT] [--save]
`--beside`: a checkout of this project with an extension of its own in its .venv.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tabulate import tabulate

from benchmarks.attention_cases import Case, Other, shapes
from benchmarks.attention_errors import BESIDE, HERE, error_rows
from benchmarks.common import keep_memory, machine, merge
from qfx import _C

SECONDS = 4e-3  # of a sample
FLOAT = "float32"
Row = dict[str, Any]


def sample(run: Callable[[], Any], isa: str | None, clock: Callable[[], float]) -> float:
    if isa is not None:
        _C.set_isa(isa)
    run()
    run()
    started, count = clock(), 0
    while count == 0 or clock() - started < SECONDS:
        run()
        count += 1
    return (clock() - started) / count


def times(case: Case, other: Other | None, rounds: int) -> list[Row]:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    isas = [isa for isa in _C.isas() if isa != "ref"]
    ways: dict[tuple[str, str], Callable[[], float]] = {
        ("", FLOAT): lambda: sample(case.in_float, None, clock),
        **{(isa, HERE): partial(sample, case.in_int8, isa, clock) for isa in isas},
    }
    if other is not None:
        other.load(case)
        ways |= {(isa, BESIDE): lambda i=isa: other.run(i, SECONDS)[0] for isa in isas}  # type: ignore[misc]
    found: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            found[way].append(run())
    middle = {way: median(seconds) for way, seconds in found.items()}
    in_float = middle["", FLOAT]
    rows = []
    for isa in isas:
        row = {"case": case.name, "shape": case.shape, "isa": isa}
        row |= {"float us": round(in_float * 1e6, 1), "us": round(middle[isa, HERE] * 1e6, 1)}
        row["of float"] = round(in_float / middle[isa, HERE], 2)
        if other is not None:
            row["of the other"] = round(middle[isa, BESIDE] / middle[isa, HERE], 2)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="names of cases")
    parser.add_argument("--beside", type=Path, help="another checkout, with a build of its own")
    parser.add_argument("--errors", action="store_true", help="in decibels, not times")
    parser.add_argument("--models", action="store_true", help="of trained models too")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    keep_memory()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    other = Other(options.beside.resolve(), options.threads) if options.beside else None
    names = [name for name in options.only.split(",") if name]
    with torch.inference_mode():
        if options.errors:
            rows = error_rows(other, options.models)
        else:
            cases = (c for c in shapes() if not names or c.name in names)
            rows = [row for c in cases for row in times(c, other, options.rounds)]
            rows = [{**r, "threads": options.threads} for r in rows]
    print(machine())
    print(tabulate(rows, headers="keys"))
    if options.save:
        what = "attention-errors" if options.errors else "attention"
        key = ("case",) if options.errors else ("case", "isa", "threads")
        print(f"wrote {merge(what, rows, key)}")


if __name__ == "__main__":
    main()
