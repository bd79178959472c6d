"""The error of the cost model: predicted and measured times of linears with sizes between the
points of its grid."""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Iterator
from statistics import median

import torch
import torch.nn.functional as F

from benchmarks.common import keep_memory
from benchmarks.linear import Shape
from benchmarks.question import Question, Row
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
ERRORS = ("float_error", "int8_error", "ratio_error")


def shapes(count: int, seed: int = 0) -> list[Shape]:
    """Returns sizes spread evenly on a logarithmic scale, of at most 2^31 multiply-adds."""
    generator = random.Random(seed)
    found: list[Shape] = []
    while len(found) < count:
        shape = Shape(*(round(low * (high / low) ** generator.random()) for low, high in LIMITS))
        found += [shape] if shape.macs < 2**31 else []
    return found


def measure(m: int, k: int, n: int) -> Row:
    """Returns one row: microseconds measured and predicted, and the relative errors of the
    prediction. Float and int8 take turns."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, k, generator=generator) for rows in (m, n))
    given = (x, pack(w, (), Packing(QSpec())).weight, list(Layout(n)), None)
    how = (list(Code(symmetric=0)), "none", torch.float32)
    float_s, int8_s = fastest(
        lambda: F.linear(x, w), lambda: torch.ops.qfx.linear_dynamic(*given, *how), rounds=9
    )
    with unlimited():
        scheme = Scheme(x=QSpec(symmetric=False))
        guess = MachineCost().estimate(Work.linear(m, k, n, torch.float32, scheme))
    ratio = (guess.float_s / guess.int8_s) / (float_s / int8_s)
    errors = (guess.float_s / float_s - 1, guess.int8_s / int8_s - 1, ratio - 1)
    times = {"float": float_s, "predicted_float": guess.float_s}
    times |= {"int8": int8_s, "predicted_int8": guess.int8_s}
    return {
        "shape": f"{m}x{k}x{n}",
        "isa": _C.isa(),
        **{f"{name}_us": round(seconds * 1e6, 2) for name, seconds in times.items()},
        **{name: round(error, 3) for name, error in zip(ERRORS, errors, strict=True)},
    }


def below(rows: list[Row]) -> list[str]:
    """Returns a line for each error: how often it is within the bar, and its median."""
    return [
        f"{rows[0]['isa']}: {sum(abs(r[e]) <= BAR for r in rows)} of {len(rows)} within {BAR:.0%}, "
        f"median {median(abs(r[e]) for r in rows):.3f}: {e}"
        for e in ERRORS
    ]


@torch.no_grad()
def tables(options: Namespace) -> Iterator[list[Row]]:
    keep_memory()
    for isa in (isa for isa in _C.isas() if isa != "ref"):
        _C.set_isa(isa)
        yield [measure(*shape) for shape in shapes(options.count)]


QUESTION = Question(
    "How exact are the times that the cost model predicts?",
    tables,
    key=("shape", "isa"),
    options={"count": 40},
    below=below,
)
