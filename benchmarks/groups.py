"""One linear layer on 8-bit weights with a scale for each group of K, against one scale a row.

The quantized activations are given; each kind runs in turn, on every ISA of this machine. A ratio
is the kind's median time over that of int8_linear.
    python -m benchmarks.groups [--threads 1] [--shapes 128x768x3072,...] [--save]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks.common import Candidate, interleaved, keep_memory, machine, save
from benchmarks.linear import LARGEST_FOR_REF, Shape, arguments
from qfx import _C
from qfx.ops.packing import Packing
from qfx.values.scheme import QSpec
from qfx.weights.cache import pack

SHAPES = [Shape(m, k, n) for k, n in ((768, 3072), (4096, 4096)) for m in (1, 16, 128)]
BASELINE = "one scale a row"
KINDS = {  # group, symmetric
    "64": (64, True),
    "64 with zero points": (64, False),
    "128": (128, True),
    "all of K with zero points": (0, False),
}
BITS = 8
OPS = torch.ops.qfx


def calls(shape: Shape) -> dict[str, Callable[[], Tensor]]:
    """Each kind of weight, as a function that runs its linear."""
    generator = torch.Generator().manual_seed(0)
    x_mk, w_nk, bias_n = (
        torch.randn(size, generator=generator)
        for size in ((shape.m, shape.k), (shape.n, shape.k), (shape.n,))
    )
    codes = OPS.quantize(x_mk, [1], BITS, False)
    tail = (bias_n, "none", torch.float32)
    w_q, w_scale_n1, _ = OPS.quantize(w_nk, [1], BITS, True)
    row = (OPS.pack_weight(w_q), w_scale_n1.flatten())
    made: dict[str, Callable[[], Tensor]] = {
        BASELINE: partial(OPS.int8_linear, *codes, *row, *tail)
    }
    for name, (group, symmetric) in KINDS.items():
        made_of = pack(w_nk, (), Packing(QSpec(bits=BITS, symmetric=symmetric, group=group)))
        weight = (made_of.blocks, made_of.scale, made_of.zero_point)
        made[name] = partial(OPS.int8_linear_groups, *codes, *weight, *tail)
    return made


def measure(shape: Shape, rounds: int) -> list[dict[str, Any]]:
    """A row for each ISA, in the same turns."""
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
