"""One linear layer in 1 bit and in int8 on every ISA of this machine, compared with F.linear in
float32.

All run in one process, in turn; the 1-bit time includes taking the signs of x. The product is first
checked to be exact.
    python -m benchmarks.binary [--threads 1] [--shapes 128x4096x4096,...] [--save]
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.common import Candidate, interleaved
from benchmarks.linear import FLOAT, OPS, Shape, as_row, make_case, run
from qfx import _C

TOKENS = (1, 16, 128, 512)
WEIGHTS = ((768, 3072), (4096, 4096))  # K x N
SHAPES = [Shape(m, k, n) for (k, n), m in product(WEIGHTS, TOKENS)]


def check_exact(x_mk: torch.Tensor, w_nk: torch.Tensor, packed: torch.Tensor, isa: str) -> None:
    """Checks binary_mm on `isa` against a float64 matmul of the signs."""
    _C.set_isa(isa)
    found = OPS.binary_mm(x_mk, packed, w_nk.shape[0])
    x_signs, w_signs = (torch.where(t >= 0, 1.0, -1.0).double() for t in (x_mk, w_nk))
    wrong = int((found.double() != x_signs @ w_signs.t()).sum())
    if wrong:
        raise AssertionError(f"{isa}: {wrong} of {found.numel()} sums are wrong")


def measure(shape: Shape, rounds: int) -> list[dict[str, Any]]:
    """Returns one row for float32, then one in int8 and one in 1 bit for each ISA."""
    case = make_case(shape)
    packed, scale_n = OPS.binary_pack(case.w_nk), case.w_nk.abs().mean(1)

    def binary() -> torch.Tensor:
        return OPS.binary_linear(case.x_mk, packed, scale_n, case.bias_n, "none", torch.float32)

    isas = [isa for isa in _C.isas() if isa != "ref"]
    candidates = {FLOAT: Candidate(case.float32)}
    for isa in isas:
        check_exact(case.x_mk, case.w_nk, packed, isa)
        prepare = partial(_C.set_isa, isa)
        candidates[f"{isa} int8"] = Candidate(case.int8, prepare)
        candidates[f"{isa} binary"] = Candidate(binary, prepare)
    times = interleaved(candidates, rounds)
    rows = [as_row(shape, name, times[name], times[FLOAT]) for name in candidates]
    for isa, row in zip(isas, rows[2::2], strict=True):
        over = times[f"{isa} int8"].median / times[f"{isa} binary"].median
        row["speedup_over_int8"] = round(over, 2)
    return rows


if __name__ == "__main__":
    run("binary", __doc__, SHAPES, measure)
