"""Operations limited by memory: few rows with cold weights, and quantizing, compared with the
measured bandwidth.

Weights are larger than the last cache and used in rotation. Reading is a float32 sum, copying one
tensor to another; both and everything else run in one process, in turn.
    python -m benchmarks.memory [--threads 1] [--rounds 15] [--save]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from benchmarks.common import Candidate, Timing, interleaved, keep_memory, machine, save
from benchmarks.linear import OPS
from qfx import _C
from qfx.ops.code import Code
from qfx.ops.layout import Layout

ROWS = (1, 2, 4, 8, 16)
N, K, COPIES = 11008, 4096, 4  # 4 x 45 MB in int8
QUANTIZED = (512, 4096)


def rotating(call: Callable[[Tensor], Tensor], weights: Sequence[Tensor]) -> Callable[[], Tensor]:
    turn = cycle(weights)
    return lambda: call(next(turn))


def linears(isas: Sequence[str]) -> dict[str, Candidate]:
    """Returns F.linear and the int8 linear with dynamic and with float activations, for a few
    rows."""
    generator = torch.Generator().manual_seed(0)
    w_nk = torch.randn(N, K, generator=generator)
    codes, scale, _ = OPS.quantize(w_nk, list(Code()))
    packs, floats = [OPS.pack_weight(codes, scale) for _ in range(COPIES)], [w_nk, w_nk.clone()]
    tail, code = (list(Layout(N)), None), list(Code(symmetric=0))
    found: dict[str, Candidate] = {}
    for m in ROWS:
        x = torch.randn(m, K, generator=generator)

        def dynamic(packed: Tensor, x: Tensor = x) -> Tensor:
            return OPS.linear_dynamic(x, packed, *tail, code, "none", torch.float32)  # type: ignore

        def weight_only(packed: Tensor, x: Tensor = x) -> Tensor:
            return OPS.linear_float(x, packed, *tail, "none", torch.float32)  # type: ignore

        found[f"float32 M={m}"] = Candidate(rotating(partial(F.linear, x), floats))
        for isa in isas:
            prepare = partial(_C.set_isa, isa)
            found[f"{isa} M={m}"] = Candidate(rotating(dynamic, packs), prepare)
            if m == 1:
                found[f"{isa} weight-only M=1"] = Candidate(rotating(weight_only, packs), prepare)
    return found


def quantizing(isas: Sequence[str]) -> dict[str, Candidate]:
    x = torch.randn(QUANTIZED, generator=torch.Generator().manual_seed(1))
    found = {"copy": Candidate(partial(torch.empty_like(x).copy_, x)), "clone": Candidate(x.clone)}
    for isa in isas:
        for name, code in (("quantize", Code(symmetric=0)), ("quantize symmetric", Code())):
            call = partial(OPS.quantize, x, list(code))
            found[f"{isa} {name}"] = Candidate(call, partial(_C.set_isa, isa))
    return found


def as_row(
    name: str, time: Timing, moved: int, m: int | None, float_s: float | None
) -> dict[str, Any]:
    return {
        "case": name,
        "median_us": round(time.median * 1e6, 1),
        "best_us": round(time.best * 1e6, 1),
        "gb_per_s": round(moved / time.median / 1e9, 1),
        "gmacs": None if m is None else round(m * N * K / time.median / 1e9, 1),
        "speedup": None if float_s is None else round(float_s / time.median, 2),
    }


def rows_of(times: dict[str, Timing], read_bytes: int) -> list[dict[str, Any]]:
    """Returns rows with the bytes that have to move: weights, or what is read and written."""
    size = QUANTIZED[0] * QUANTIZED[1]
    rows = [as_row("read", times["read"], read_bytes, None, None)]
    for name, time in times.items():
        if " M=" in name:
            m = int(name.rpartition("=")[2])
            width = 4 if name.startswith("float32") else 1
            rows.append(as_row(name, time, N * K * width, m, times[f"float32 M={m}"].median))
        elif name != "read":
            rows.append(as_row(name, time, size * (5 if "quantize" in name else 8), None, None))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    options = parser.parse_args()
    keep_memory()
    torch.set_num_threads(options.threads)
    isas = [isa for isa in _C.isas() if isa != "ref"]
    with torch.inference_mode():
        large = torch.randn(48 * 2**20)
        candidates = {"read": Candidate(large.sum), **linears(isas), **quantizing(isas)}
        times = interleaved(candidates, options.rounds)
    rows = [{**row, "threads": options.threads} for row in rows_of(times, large.numel() * 4)]
    print(machine())
    print(tabulate(rows, headers="keys"))
    if options.save:
        print(f"wrote {save('memory', rows)}")


if __name__ == "__main__":
    main()
