"""One linear layer: qfx's int8 on every ISA of this machine, compared with F.linear in float32;
also in 7 bits if there are kernels for it.

All run in one process, in turn. The int8 product is first checked to be exact.
    python -m benchmarks.linear [--threads 1] [--shapes 16x768x3072,...] [--save]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from benchmarks.common import Candidate, Timing, interleaved, keep_memory, machine, save
from qfx import _C
from qfx.ops.code import Code
from qfx.ops.layout import Layout

TOKENS = (1, 4, 16, 128, 512)
WEIGHTS = (  # K x N
    (768, 768),
    (768, 3072),
    (3072, 768),
    (2048, 2048),
    (4096, 4096),
    (4096, 11008),
)
LARGEST_FOR_REF = 2**24  # multiply-adds: the scalar reference is for small shapes
FLOAT = "float32"
OPS = torch.ops.qfx


@dataclass(frozen=True)
class Shape:
    """The sizes of y [m, n] = x [m, k] @ w [n, k].T."""

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
    """The tensors of one shape, in float32 and quantized to weights of `bits`."""

    x_mk: Tensor
    w_nk: Tensor
    bias_n: Tensor
    bits: int
    w_codes_nk: Tensor
    packed: Tensor

    @property
    def code(self) -> list[int]:
        """The quantization of activations."""
        return list(Code(self.bits, symmetric=0))

    def float32(self) -> Tensor:
        return F.linear(self.x_mk, self.w_nk, self.bias_n)

    def int8(self) -> Tensor:
        given = (self.packed, list(Layout(len(self.bias_n))), self.bias_n, self.code)
        return OPS.linear_dynamic(self.x_mk, *given, "none", torch.float32)  # type: ignore


@dataclass(frozen=True)
class Kernel:
    """An instruction set, and the bits of activations and weights."""

    isa: str
    bits: int

    def __str__(self) -> str:
        return self.isa if self.bits == 8 else f"{self.isa} {self.bits}-bit"

    def prepare(self) -> None:
        _C.set_isa(self.isa)

    def multiply(self) -> int:
        """Runs the multiply instructions alone and returns the number of multiply-adds. The ceiling
        is that of 8 bits for all: the gain of fewer bits shows as more than 100 %."""
        return _C.multiply(100_000)


def kernels() -> list[Kernel]:
    """Returns the kernels; fewer bits only if they have kernels of their own."""
    found = []
    for isa in _C.isas():
        _C.set_isa(isa)
        own = _C.kernel_for(128, 7, 7) != _C.kernel_for(128)
        found += [Kernel(isa, bits) for bits in ((8, 7) if own else (8,))]
    return found


def make_case(shape: Shape, bits: int = 8) -> Case:
    generator = torch.Generator().manual_seed(0)
    x_mk, w_nk, bias_n = (
        torch.randn(size, generator=generator)
        for size in ((shape.m, shape.k), (shape.n, shape.k), (shape.n,))
    )
    w_codes_nk, w_scale_n1, _ = OPS.quantize(w_nk, list(Code(bits)))
    packed = OPS.pack_weight(w_codes_nk, w_scale_n1)
    return Case(x_mk, w_nk, bias_n, bits, w_codes_nk, packed)


def check_exact(case: Case, shape: Shape, isa: str) -> None:
    """Checks int8_mm on `isa` against a float64 matmul of the integers, which is exact below
    2^53."""
    _C.set_isa(isa)
    q_mk, _, zero_m1 = OPS.quantize(case.x_mk, case.code)
    found = OPS.int8_mm(q_mk, zero_m1, case.packed, shape.n)
    expected = (q_mk.double() - zero_m1.double()) @ case.w_codes_nk.double().t()
    wrong = int((found.double() != expected).sum())
    if wrong:
        raise AssertionError(f"{shape} on {isa}: {wrong} of {found.numel()} products are wrong")


def measure(shape: Shape, rounds: int) -> list[dict[str, Any]]:
    """Returns one row for float32 and one for each kernel."""
    used = [k for k in kernels() if k.isa != "ref" or shape.macs <= LARGEST_FOR_REF]
    cases = {bits: make_case(shape, bits) for bits in {k.bits for k in used}}
    candidates = {FLOAT: Candidate(cases[8].float32)}
    for kernel in used:
        case = cases[kernel.bits]
        check_exact(case, shape, kernel.isa)
        candidates[str(kernel)] = Candidate(case.int8, kernel.prepare)
        candidates[f"{kernel} peak"] = Candidate(kernel.multiply, kernel.prepare)
    times = interleaved(candidates, rounds)
    rows = [as_row(shape, name, times[name], times[FLOAT]) for name in (FLOAT, *map(str, used))]
    for row, kernel in zip(rows[1:], used, strict=True):
        kernel.prepare()
        peak = kernel.multiply() / times[f"{kernel} peak"].best / 1e9 * torch.get_num_threads()
        row["percent_of_peak"] = round(100 * row["gmacs"] / peak) if peak else None
    return rows


def as_row(shape: Shape, isa: str, time: Timing, baseline: Timing) -> dict[str, Any]:
    return {
        "shape": str(shape),
        "isa": isa,
        "median_us": round(time.median * 1e6, 2),
        "best_us": round(time.best * 1e6, 2),
        "gmacs": round(shape.macs / time.median / 1e9, 2),
        "speedup": round(baseline.median / time.median, 3),
    }


def arguments(description: str, default: Sequence[Shape]) -> argparse.Namespace:
    return parser_of(description, default).parse_args()


def parser_of(description: str, default: Sequence[Shape]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--shapes", type=lambda s: [Shape.parse(v) for v in s.split(",")], default=default
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    return parser


def run(
    name: str,
    description: str,
    default: Sequence[Shape],
    measure: Callable[[Shape, int], list[dict[str, Any]]],
) -> None:
    """Runs a benchmark of shapes as a command: prints or saves the rows of `measure`(shape,
    rounds)."""
    options = arguments(description, default)
    keep_memory()
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for shape in options.shapes:
            rows += measure(shape, options.rounds)
    rows = [{**row, "threads": options.threads} for row in rows]
    print(machine())
    print(tabulate(rows, headers="keys"))
    if options.save:
        threads = "" if options.threads == 1 else f"-{options.threads}-threads"
        print(f"wrote {save(name + threads, rows)}")


if __name__ == "__main__":
    SHAPES = [Shape(m, k, n) for (k, n), m in product(WEIGHTS, TOKENS)]
    run("linear", __doc__, SHAPES, measure)
