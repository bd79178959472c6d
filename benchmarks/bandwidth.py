"""Products of one or a few rows with weights that no cache holds: the share of the read bandwidth,
by hint.

Weights are 4096 x 4096 and used in turn, so that each has been evicted when it is used again. The
read bandwidth is the faster of torch's sums of the same bytes, as float32 and as int64. One thread
is timed by its own clock, which a busy machine disturbs less; all ways take turns, and medians and
best deciles are printed. The way `set` uses the format's parameters as set before this program.
    python -m benchmarks.bandwidth [--megabytes 1024] [--isa avx2 ...] [--rows 1 ...] [--save]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from statistics import median
from typing import Any

import qfx._C as _C
import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks.common import machine, merge
from qfx.ops.layout import Layout

SIZE = 4096  # K and N
AT_ONCE = 4  # weights of a sample, 64 MB
OPS = torch.ops.qfx
WAYS: dict[str, dict[str, Any]] = {
    "set": {},
    **{
        f"{hint}+{ahead}": {"hint": hint, "ahead": ahead}
        for hint, ahead in (("t0", 2048), ("t0", 4096), ("t1", 2048), ("t1", 8192), ("nta", 4096))
    },
}


def weights(megabytes: int) -> list[Tensor]:
    """Returns packed weights of `megabytes` in total."""
    codes = torch.randint(-127, 128, (SIZE, SIZE), dtype=torch.int8)
    one = OPS.pack_weight(codes, torch.rand(SIZE))
    return [one.clone() for _ in range(max(1, megabytes * 2**20 // SIZE**2))]


def rate(run: Callable[[Tensor], Any], turn: Iterator[Tensor]) -> float:
    """Returns the GB/s of weights over AT_ONCE calls."""
    taken = [next(turn) for _ in range(AT_ONCE)]
    start = time.thread_time()
    for w in taken:
        run(w)
    return AT_ONCE * SIZE**2 / (time.thread_time() - start) / 1e9


def readers() -> dict[str, Callable[[Tensor], Any]]:
    """Returns ways to read the same bytes."""
    return {
        "float32": lambda w: w[: SIZE**2].view(torch.float32).sum(),
        "int64": lambda w: w[: SIZE**2].view(torch.int64).sum(),
    }


def calls(rows: int) -> Callable[[Tensor], Any]:
    q = torch.randint(-127, 128, (rows, SIZE), dtype=torch.int8)
    scale, zero = torch.rand(rows, 1), torch.zeros(rows, 1, dtype=torch.int32)
    end = (list(Layout(SIZE)), None, "none", torch.float32)
    return lambda w: OPS.linear(q, scale, zero, w, *end)


def measure(isa: str, rows: int, all_weights: list[Tensor], rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each way. The parameters are restored."""
    before, turn, run = _C.tuning(isa), cycle(all_weights), calls(rows)
    rates: dict[str, list[float]] = {name: [] for name in (*readers(), *WAYS)}
    for w in all_weights:
        run(w)  # the checksum of each weight is read once
    try:
        for _ in range(rounds):
            for name, reader in readers().items():
                rates[name].append(rate(reader, turn))
            for name, way in WAYS.items():
                _C.set_tuning(isa, before)
                _C.set_tuning(isa, dict.fromkeys(before, way))
                rates[name].append(rate(run, turn))
    finally:
        _C.set_tuning(isa, before)
    read = max(median(rates[name]) for name in readers())
    best = max(decile(rates[name]) for name in readers())
    size = len(all_weights) * SIZE**2 >> 20
    return [
        {
            "isa": isa,
            "rows": rows,
            "megabytes": size,
            "way": name,
            "gb_s": round(median(rates[name]), 2),
            "share": round(median(rates[name]) / read, 3),
            "best_decile_share": round(decile(rates[name]) / best, 3),
            "read_gb_s": round(read, 2),
        }
        for name in WAYS
    ]


def decile(rates: list[float]) -> float:
    """Returns the rate that a tenth of the samples reach."""
    return sorted(rates)[len(rates) * 9 // 10]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=int, nargs="*", default=[32, 1024])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--isa", nargs="*", default=[i for i in _C.isas() if i != "ref"])
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for megabytes in options.megabytes:
        all_weights = weights(megabytes)
        for isa in options.isa:
            _C.set_isa(isa)
            for m in options.rows:
                rows += measure(isa, m, all_weights, options.rounds)
    print(machine())
    print(tabulate(rows, headers="keys"))
    if options.save:
        commit = machine()["commit"]
        rows = [{**row, "commit": commit} for row in rows]
        print(f"wrote {merge('bandwidth', rows, ['isa', 'rows', 'megabytes', 'way'])}")


if __name__ == "__main__":
    main()
