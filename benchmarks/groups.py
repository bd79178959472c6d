"""One linear layer in int8 with scales for groups of K, compared with one scale per row.

The operator rotates and quantizes float activations. The kinds take turns, on every ISA of this
machine. A ratio is the kind's median time divided by that of one scale per row.
    python -m benchmarks.groups [--threads 1] [--shapes 128x768x3072,...] [--save]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks.common import Candidate, interleaved, keep_memory, machine, save
from benchmarks.linear import LARGEST_FOR_REF, Shape, arguments
from qfx import _C
from qfx.ops.code import code_of
from qfx.ops.layout import layout_of
from qfx.ops.packing import Packing
from qfx.values.scheme import QSpec
from qfx.weights.cache import pack

SHAPES = [Shape(m, k, n) for k, n in ((768, 3072), (1024, 1024)) for m in (1, 16, 128, 512)]
BASELINE = "one scale a row"


class Kind(NamedTuple):
    """A kind of linear: which operands have groups, of which size, and zero points."""

    group: int
    x: bool = True
    symmetric: bool = True


KINDS = {
    "both 32": Kind(32),
    "both 64": Kind(64),
    "both 128": Kind(128),
    "weights 64": Kind(64, x=False),
    "weights 64, zero points": Kind(64, x=False, symmetric=False),
    "both 64, zero points": Kind(64, symmetric=False),
}
ROTATION = 64
OPS = torch.ops.qfx


def calls(shape: Shape) -> dict[str, Callable[[], Tensor]]:
    """Returns a function that runs the linear for each kind."""
    generator = torch.Generator().manual_seed(0)
    x_mk, w_nk, bias_n = (
        torch.randn(size, generator=generator)
        for size in ((shape.m, shape.k), (shape.n, shape.k), (shape.n,))
    )

    def call(kind: Kind) -> Callable[[], Tensor]:
        spec = QSpec(symmetric=kind.symmetric, group=kind.group)
        w = pack(w_nk, (), Packing(spec, rotation=ROTATION)).weight
        x = QSpec(symmetric=kind.symmetric, group=kind.group if kind.x else 0)
        how = (layout_of(spec, 0, shape.n), bias_n, code_of(x, ROTATION), "none", torch.float32)
        return partial(OPS.linear_dynamic, x_mk, w, *how)

    return {name: call(kind) for name, kind in {BASELINE: Kind(0), **KINDS}.items()}


def measure(shape: Shape, rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each ISA; all kinds and ISAs take turns."""
    made = calls(shape)
    isas = [isa for isa in _C.isas() if isa != "ref" or shape.macs <= LARGEST_FOR_REF]
    candidates = {
        f"{isa} {kind}": Candidate(call, partial(_C.set_isa, isa))
        for isa in isas
        for kind, call in made.items()
    }
    times = interleaved(candidates, rounds)
    rows = []
    for isa in isas:
        base = times[f"{isa} {BASELINE}"]
        ratios = {k: round(times[f"{isa} {k}"].median / base.median, 3) for k in KINDS}
        rows.append(
            {"shape": str(shape), "isa": isa, "int8_linear_us": round(base.median * 1e6, 2)}
            | ratios
        )
    return rows


def main() -> None:
    options = arguments(__doc__ or "", SHAPES)
    keep_memory()
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        rows = [row for shape in options.shapes for row in measure(shape, options.rounds)]
    print(machine())
    print(tabulate(rows, headers="keys"))
    if options.save:
        rows = [{**row, "threads": options.threads} for row in rows]
        print(f"wrote {save('groups', rows)}")


if __name__ == "__main__":
    main()
