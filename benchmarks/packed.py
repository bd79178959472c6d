"""One linear layer whose weight is stored in 4 or 5 bits, against int8 with one scale a row.

Activations are floats, which the operator rotates and quantizes; each kind runs in turn, on every
ISA of this machine, on weights that are read in turn and fill `--set` MB as int8, more than caches
hold: what a token reads. A ratio is the speed of the kind over that of int8_linear_dynamic.
    python -m benchmarks.packed [--threads 1] [--set 600] [--shapes 1x2048x2048,...] [--save]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks.common import Candidate, interleaved, keep_memory, machine, save
from benchmarks.linear import LARGEST_FOR_REF, Shape, parser_of
from qfx import _C
from qfx.ops.packing import Packing
from qfx.values.scheme import QSpec
from qfx.weights.cache import pack

SHAPES = [Shape(m, 2048, 2048) for m in (1, 2, 4, 8, 16, 128, 512)]
BASELINE = "int8"
KINDS = {
    "4 bits, 32": QSpec(4, symmetric=False, group=32, packed=True),
    "4 bits, 64": QSpec(4, symmetric=False, group=64, packed=True),
    "4 bits, 64, no zero points": QSpec(4, group=64, packed=True),
    "4 bits, 128": QSpec(4, symmetric=False, group=128, packed=True),
    "5 bits, 64": QSpec(5, symmetric=False, group=64, packed=True),
}
ROTATION = 64
OPS = torch.ops.qfx


def in_turn(packed: Tensor, count: int) -> Callable[[], Tensor]:
    """One of `count` copies after the other."""
    copies = itertools.cycle([packed.clone() for _ in range(count)])
    return lambda: next(copies)


def calls(shape: Shape, megabytes: int) -> dict[str, Callable[[], Tensor]]:
    """Each kind of linear, as a function that runs it."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((shape.m, shape.k), (shape.n, shape.k), (shape.n,))
    x_mk, w_nk, bias_n = (torch.randn(size, generator=generator) for size in sizes)
    count = max(1, (megabytes << 20) // (shape.n * shape.k))
    end = ("none", torch.float32, None, ROTATION)
    row = pack(w_nk, (), Packing(QSpec(), rotation=ROTATION))

    def int8(weight: Callable[[], Tensor]) -> Tensor:
        how = (row.scale, bias_n, [1], 8, True)
        return OPS.int8_linear_dynamic(x_mk, weight(), *how, *end)  # type: ignore[no-any-return]

    def fewer(spec: QSpec, weight: Callable[[], Tensor]) -> Tensor:
        how = (shape.n, spec.bits, spec.group, bias_n, [1], 0, 8, True)
        return OPS.lowbit_linear_dynamic(x_mk, weight(), *how, *end)  # type: ignore[no-any-return]

    made: dict[str, Callable[[], Tensor]] = {BASELINE: partial(int8, in_turn(row.blocks, count))}
    for name, spec in KINDS.items():
        packed = pack(w_nk, (), Packing(spec, rotation=ROTATION)).blocks
        made[name] = partial(fewer, spec, in_turn(packed, count))
    return made


def measure(shape: Shape, rounds: int, megabytes: int) -> list[dict[str, Any]]:
    """A row for each ISA, in the same turns."""
    made = calls(shape, megabytes)
    isas = [isa for isa in _C.isas() if isa != "ref" or shape.macs <= LARGEST_FOR_REF]
    candidates = {
        f"{isa} {kind}": Candidate(call, partial(_C.set_isa, isa))
        for isa in isas
        for kind, call in made.items()
    }
    times = interleaved(candidates, rounds)
    rows = []
    for isa in isas:
        base = times[f"{isa} {BASELINE}"].median
        ratios = {k: round(base / times[f"{isa} {k}"].median, 3) for k in KINDS}
        rows.append({"shape": str(shape), "isa": isa, "int8_us": round(base * 1e6, 2)} | ratios)
    return rows


def main() -> None:
    parser = parser_of(__doc__ or "", SHAPES)
    parser.add_argument("--set", type=int, default=600, help="MB of int8 weights read in turn")
    options = parser.parse_args()
    keep_memory()
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        rows = [r for shape in options.shapes for r in measure(shape, options.rounds, options.set)]
    print(machine())
    print(tabulate(rows, headers="keys"))
    if options.save:
        rows = [{**row, "threads": options.threads, "set_mb": options.set} for row in rows]
        print(f"wrote {save('packed', rows)}")


if __name__ == "__main__":
    main()
