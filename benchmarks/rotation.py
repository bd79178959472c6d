"""The cost of the transform of K: a dynamic linear with rotation 64, without, and also with a
factor.

Activations are float32, quantized per token, symmetric. The three are timed in turns; ratios are
those of medians, and of the best samples, which a busy machine disturbs less.
    python -m benchmarks.rotation [--threads 1] [--isa avx2 ...] [--save]
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import qfx._C as _C
import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks.common import Candidate, interleaved, keep_memory, machine, merge
from qfx.ops.code import Code
from qfx.ops.layout import Layout

SHAPES = ((576, 576), (576, 1536), (1536, 576), (768, 768), (768, 3072), (4096, 4096))  # K, N
TOKENS = (16, 128)
OPS = torch.ops.qfx


def measure(isa: str, m: int, k: int, n: int, rounds: int) -> dict[str, Any]:
    x = torch.randn(m, k)
    codes = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    given = (x, OPS.pack_weight(codes, torch.full((n,), 0.01)), list(Layout(n)), None)

    def run(rotation: int, factor: Tensor | None = None) -> Tensor:
        how = (list(Code(rotation=rotation)), "none", torch.float32, factor)
        return OPS.linear_dynamic(*given, *how)  # type: ignore[no-any-return]

    times = interleaved(
        {
            "plain": Candidate(partial(run, 0)),
            "rotated": Candidate(partial(run, 64)),
            "scaled": Candidate(partial(run, 64, torch.ones(k))),
        },
        rounds,
    )
    plain = times.pop("plain")
    row = {"isa": isa, "shape": f"{m}x{k}x{n}", "threads": torch.get_num_threads()}
    row |= {"plain_us": round(plain.median * 1e6, 2)}
    for name, time in times.items():
        row[name] = round(time.median / plain.median, 3)
        row[f"{name}_best"] = round(time.best / plain.best, 3)
    row["best_ns_per_element"] = round((times["rotated"].best - plain.best) / m / k * 1e9, 4)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--isa", nargs="*", default=[i for i in _C.isas() if i != "ref"])
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_memory()
    rows = []
    for isa in options.isa:
        _C.set_isa(isa)
        rows += [measure(isa, m, k, n, options.rounds) for k, n in SHAPES for m in TOKENS]
    print(machine())
    print(tabulate(rows, headers="keys"))
    if options.save:
        commit = machine()["commit"]
        rows = [{**row, "commit": commit} for row in rows]
        print(f"wrote {merge('rotation', rows, ['isa', 'shape', 'threads'])}")


if __name__ == "__main__":
    main()
