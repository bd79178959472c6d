"""One linear layer with a weight stored in 4 or 5 bits, compared with int8 with one scale per row.

The operator rotates and quantizes float activations. The kinds take turns, on every ISA of this
machine. Weights are read one after the other and fill `--set` MB for every kind, more than caches
hold, as when decoding a token. A ratio is the speed of the kind divided by that of int8.
    python -m benchmarks.packed [--threads 1] [--set 1000] [--shapes 1x2048x2048,...] [--save]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks.common import Candidate, interleaved, keep_memory, machine, save
from benchmarks.linear import LARGEST_FOR_REF, Shape, parser_of
from qfx import _C
from qfx.ops.code import Code
from qfx.ops.layout import layout_of
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


@lru_cache
def weights(k: int, n: int, spec: QSpec, megabytes: int) -> list[Tensor]:
    """Returns as many packed weights as fill the memory, each on pages of its own."""
    w_nk = torch.randn(n, k, generator=torch.Generator().manual_seed(0))
    packing = Packing(spec, rotation=ROTATION)
    count = max(1, (megabytes << 20) // pack(w_nk, (), packing).weight.nbytes)
    return [pack(w_nk, (), packing).weight for _ in range(count)]


def calls(shape: Shape, megabytes: int) -> dict[str, Callable[[], Tensor]]:
    """Returns for each kind of linear a function that runs it on one weight after the other."""
    generator = torch.Generator().manual_seed(1)
    x_mk, bias_n = (
        torch.randn(*size, generator=generator) for size in ((shape.m, shape.k), (shape.n,))
    )
    end = (bias_n, list(Code(rotation=ROTATION)), "none", torch.float32)

    def call(spec: QSpec) -> Callable[[], Tensor]:
        turn = itertools.cycle(weights(shape.k, shape.n, spec, megabytes))
        layout = layout_of(spec, 0, shape.n)
        return lambda: OPS.linear_dynamic(x_mk, next(turn), layout, *end)  # type: ignore[no-any-return]

    return {name: call(spec) for name, spec in {BASELINE: QSpec(), **KINDS}.items()}


def measure(shape: Shape, rounds: int, megabytes: int) -> list[dict[str, Any]]:
    """Returns a row for each ISA; all kinds and ISAs take turns."""
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
    parser.add_argument("--set", type=int, default=1000, help="MB of weights of each kind")
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
