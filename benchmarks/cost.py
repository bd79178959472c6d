"""The error of the cost model: predicted and measured times of linears with sizes between the
points of its grid.

Times F.linear and qfx's int8 in turns and compares both, and their ratio, with the prediction.
    python -m benchmarks.cost [--threads 1] [--count 40] [--save]
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate

from benchmarks.common import keep_memory, machine, save
from qfx import _C
from qfx.cost.machine import MachineCost
from qfx.cost.model import Work
from qfx.cost.spending import unlimited
from qfx.cost.timing import fastest
from qfx.ops.code import Code
from qfx.ops.layout import Layout
from qfx.ops.packing import Packing
from qfx.values.scheme import QSpec, Scheme
from qfx.weights.cache import pack

LIMITS = ((1, 512), (32, 4096), (16, 4096))  # of M, K, N
BAR = 0.2
SCHEME = Scheme(x=QSpec(symmetric=False))


@dataclass(frozen=True)
class Shape:
    m: int
    k: int
    n: int

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n}"


def shapes(count: int, seed: int = 0) -> list[Shape]:
    """Returns sizes spread evenly on a logarithmic scale, of at most 2^31 multiply-adds."""
    generator = random.Random(seed)
    found: list[Shape] = []
    while len(found) < count:
        shape = Shape(*(round(low * (high / low) ** generator.random()) for low, high in LIMITS))
        if shape.m * shape.k * shape.n < 2**31:
            found.append(shape)
    return found


def measure(shape: Shape) -> dict[str, Any]:
    """Returns one row: microseconds measured and predicted, and the relative errors of the
    prediction."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, shape.k, generator=generator) for rows in (shape.m, shape.n))
    given = (pack(w, (), Packing(QSpec())).weight, list(Layout(shape.n)), None)
    float_s, int8_s = fastest(
        lambda: F.linear(x, w),
        lambda: torch.ops.qfx.linear_dynamic(
            x, *given, list(Code(symmetric=0)), "none", torch.float32
        ),
        rounds=9,
    )
    work = Work.linear(shape.m, shape.k, shape.n, torch.float32, SCHEME)
    with unlimited():
        predicted = MachineCost().estimate(work)
    errors = {
        "float_error": predicted.float_s / float_s - 1,
        "int8_error": predicted.int8_s / int8_s - 1,
        "ratio_error": (predicted.float_s / predicted.int8_s) / (float_s / int8_s) - 1,
    }
    times = {
        "float_us": float_s,
        "predicted_float_us": predicted.float_s,
        "int8_us": int8_s,
        "predicted_int8_us": predicted.int8_s,
    }
    return {
        "shape": str(shape),
        "isa": _C.isa(),
        **{name: round(seconds * 1e6, 2) for name, seconds in times.items()},
        **{name: round(error, 3) for name, error in errors.items()},
    }


def within(rows: list[dict[str, Any]], name: str) -> float:
    return sum(abs(row[name]) <= BAR for row in rows) / len(rows)


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a line for each instruction set: how many predictions are within the bar."""
    lines = []
    for isa in dict.fromkeys(row["isa"] for row in rows):
        mine = [row for row in rows if row["isa"] == isa]
        line: dict[str, Any] = {"isa": isa, "shapes": len(mine)}
        for name in ("float_error", "int8_error", "ratio_error"):
            line[f"{name} within {BAR:.0%}"] = f"{within(mine, name):.0%}"
            line[f"median |{name}|"] = round(median(abs(row[name]) for row in mine), 3)
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--count", type=int, default=40, help="shapes for each instruction set")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    keep_memory()
    torch.set_num_threads(options.threads)
    rows = []
    with torch.no_grad():
        for isa in (isa for isa in _C.isas() if isa != "ref"):
            _C.set_isa(isa)
            rows += [measure(shape) for shape in shapes(options.count)]
    rows = [{**row, "threads": options.threads} for row in rows]
    print(machine())
    print(tabulate(rows, headers="keys"))
    print(tabulate(summary(rows), headers="keys"))
    if options.save:
        print(f"wrote {save('cost', rows)}")


if __name__ == "__main__":
    main()
