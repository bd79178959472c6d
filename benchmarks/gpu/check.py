"""Correctness of one kernel, in a process of its own, because a wrong barrier would never return.

    QFX_CUDA_KERNEL=s8_swap16 python -m benchmarks.gpu.check s8 [--device cpu] [--tiny]

Products are compared with the exact float64 product of the integers, and a second run must have the
same bits; linears are compared with their reference, within a unit in the last place. Prints one
JSON object; the exit status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.operands import each
from qfx.ops import REFERENCES
from qfx.ops.layout import Layout

OPS = torch.ops.qfx
M = (1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 300)
N, K = (1, 8, 24, 72, 515, 4096), (1, 16, 48, 144, 1000, 4112)
TINY = ((1, 17), (8, 24), (48, 144))


@dataclass(frozen=True)
class Weight:
    """Codes w [n, k] that include the least and the largest, or floats of which the signs are
    used."""

    values: Tensor
    packed: Tensor
    scale: Tensor | None = None

    @classmethod
    def of(cls, operands: str, n: int, k: int, device: str) -> Weight:
        if operands == "b1":
            signs = torch.randn(n, k, device=device)
            return cls(signs, OPS.binary_pack(signs))
        codes = _codes(n, k, device).clamp(min=-127)
        scale = torch.rand(n, device=device) / (k + 1)
        return cls(codes, OPS.pack_weight(codes, scale), scale)


def _codes(rows: int, columns: int, device: str) -> Tensor:
    made = torch.randint(-128, 128, (rows, columns), dtype=torch.int8, device=device)
    made.view(-1)[::7] = -128
    return made


def products(weight: Weight, m: int, device: str) -> list[str]:
    """Checks int8_mm with a zero point for each row, and linear on its sums."""
    n, k = weight.values.shape
    q = _codes(m, k, device)
    zero = torch.randint(-128, 128, (m, 1), dtype=torch.int32, device=device)
    got, again = (OPS.int8_mm(q, zero, weight.packed, n) for _ in range(2))
    exact = ((q.double() - zero) @ weight.values.double().T).int()
    wrong = int((got != exact).sum())
    found = [f"{wrong} sums differ"] if wrong else []
    found += [] if torch.equal(got, again) else ["a second run differs"]
    scale = torch.rand(m, 1, device=device)
    rest = (torch.randn(n, device=device), "silu", torch.bfloat16)
    y = OPS.linear(q, scale, zero, weight.packed, list(Layout(n)), *rest).double()
    wanted = REFERENCES["dequantize"](exact, scale, None, weight.scale, *rest).double()
    off = int(((y - wanted).abs() > wanted.abs() * 2.0**-7 + 1e-6).sum())
    return found + ([f"{off} outputs are more than a unit off"] if off else [])


def sign_products(weight: Weight, m: int, device: str) -> list[str]:
    n, k = weight.values.shape
    x = torch.randn(m, k, device=device)
    x_signs, w_signs = (torch.where(t >= 0, 1.0, -1.0).double() for t in (x, weight.values))
    got = OPS.binary_mm(x, weight.packed, n)
    wrong = int((got != (x_signs @ w_signs.T).int()).sum())
    return [f"{wrong} sums of signs differ"] if wrong else []


CHECKS = {"s8": products, "b1": sign_products}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operands", choices=CHECKS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)
    wrong, cases = [], 0
    rows, *others = TINY if given.tiny else (M, N, K)
    for n, k in each(*others):
        weight = Weight.of(given.operands, n, k, given.device)
        for m in rows:
            cases += 1
            found = CHECKS[given.operands](weight, m, given.device)
            wrong += [f"{m}x{k}x{n}: {what}" for what in found]
    print(json.dumps({"cases": cases, "wrong": len(wrong), "first": wrong[:3]}))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
