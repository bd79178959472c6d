"""One linear layer: qfx's int8 on every ISA of this machine against F.linear in float32.

Both run in one process, in turn. The int8 product is first checked to be exact.
    python -m benchmarks.linear [--threads 1] [--shapes 16x768x3072,...] [--save]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from benchmarks.common import Candidate, Timing, interleaved, machine, save
from qfx import _C

TOKENS = (1, 4, 16, 128, 512)
WEIGHTS = ((768, 768), (768, 3072), (2048, 2048), (4096, 4096))  # K x N
LARGEST_FOR_REF = 2**24  # multiply-adds: the scalar reference is for small shapes
FLOAT = "float32"
OPS = torch.ops.qfx


@dataclass(frozen=True)
class Shape:
    """y [m, n] = x [m, k] @ w [n, k].T"""

    m: int
    k: int
    n: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        return cls(*map(int, text.split("x")))

    @property
    def macs(self) -> int:
        return self.m * self.k * self.n

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n}"


@dataclass(frozen=True)
class Case:
    """The tensors of one shape, in float32 and quantized."""

    x_mk: Tensor
    w_nk: Tensor
    bias_n: Tensor
    w_codes_nk: Tensor
    packed: Tensor
    w_scale_n: Tensor

    def float32(self) -> Tensor:
        return F.linear(self.x_mk, self.w_nk, self.bias_n)

    def int8(self) -> Tensor:
        return OPS.int8_linear_dynamic(
            self.x_mk,
            self.packed,
            self.w_scale_n,
            self.bias_n,
            [1],
            8,
            False,
            "none",
            torch.float32,
        )


def make_case(shape: Shape) -> Case:
    generator = torch.Generator().manual_seed(0)
    x_mk, w_nk, bias_n = (
        torch.randn(size, generator=generator)
        for size in ((shape.m, shape.k), (shape.n, shape.k), (shape.n,))
    )
    w_codes_nk, w_scale_n1, _ = OPS.quantize(w_nk, [1], 8, True)
    packed = OPS.pack_weight(w_codes_nk)
    return Case(x_mk, w_nk, bias_n, w_codes_nk, packed, w_scale_n1.flatten())


def check_exact(case: Case, shape: Shape, isa: str) -> None:
    """int8_mm on `isa` against a float64 matmul of the integers, which is exact below 2^53."""
    _C.set_isa(isa)
    q_mk, _, zero_m1 = OPS.quantize(case.x_mk, [1], 8, False)
    found = OPS.int8_mm(q_mk, zero_m1, case.packed, shape.n)
    expected = (q_mk.double() - zero_m1.double()) @ case.w_codes_nk.double().t()
    wrong = int((found.double() != expected).sum())
    if wrong:
        raise AssertionError(f"{shape} on {isa}: {wrong} of {found.numel()} products are wrong")


def measure(shape: Shape, rounds: int) -> list[dict[str, Any]]:
    """One row for float32 and one for each ISA."""
    case = make_case(shape)
    isas = [i for i in _C.isas() if i != "ref" or shape.macs <= LARGEST_FOR_REF]
    for isa in isas:
        check_exact(case, shape, isa)
    candidates = {FLOAT: Candidate(case.float32)}
    for isa in isas:
        candidates[isa] = Candidate(case.int8, prepare=partial(_C.set_isa, isa))
        candidates[f"{isa} peak"] = Candidate(multiply, prepare=partial(_C.set_isa, isa))
    times = interleaved(candidates, rounds)
    rows = [as_row(shape, name, times[name], times[FLOAT]) for name in (FLOAT, *isas)]
    for row in rows[1:]:
        _C.set_isa(row["isa"])
        peak = multiply() / times[f"{row['isa']} peak"].best / 1e9
        row["percent_of_peak"] = round(100 * row["gmacs"] / peak) if peak else None
    return rows


def multiply() -> int:
    """The multiply instructions of the ISA in force, alone; returns the multiply-adds they made."""
    return _C.multiply(100_000)


def as_row(shape: Shape, isa: str, time: Timing, baseline: Timing) -> dict[str, Any]:
    return {
        "shape": str(shape),
        "isa": isa,
        "median_us": round(time.median * 1e6, 2),
        "best_us": round(time.best * 1e6, 2),
        "gmacs": round(shape.macs / time.median / 1e9, 2),
        "speedup": round(baseline.median / time.median, 3),
    }


def arguments(description: str, default: list[Shape]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--shapes", type=lambda s: [Shape.parse(v) for v in s.split(",")], default=default
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    return parser.parse_args()


def main() -> None:
    options = arguments(__doc__, [Shape(m, k, n) for (k, n), m in product(WEIGHTS, TOKENS)])
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for shape in options.shapes:
            rows += measure(shape, options.rounds)
    rows = [{**row, "threads": options.threads} for row in rows]
    print(machine())
    print(tabulate(rows, headers="keys"))
    if options.save:
        print(f"wrote {save('linear', rows)}")


if __name__ == "__main__":
    main()
