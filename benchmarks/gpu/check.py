"""Correctness of the kernels, each in a process of its own, because a wrong barrier would never
return.

Products are compared with the exact float64 product of the integers, and a second run must have the
same bits; linears are compared with their reference, within a unit in the last place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.common import ROOT
from benchmarks.fresh import FailedError, call
from benchmarks.gpu.session import Row, Session
from qfx.ops import REFERENCES
from qfx.ops.layout import Layout

OPS = torch.ops.qfx
PORTABLE, VARIABLE = "portable", "QFX_CUDA_KERNEL"
M = (1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 300)
N, K = (1, 8, 24, 72, 515, 4096), (1, 16, 48, 144, 1000, 4112)
TINY = ((1, 17), (8, 24), (48, 144))
LIMIT = 20.0  # seconds of a kernel that is right, and of the machine's that one that hangs costs
SPLITS = (1, 2, 4)  # parts of K
MOST_TILES = 16  # of tokens: where there are more, a wider tile is faster
SMALL_M = 128  # up to here tiles are few, so that K is worth splitting


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
    wrong = int((OPS.binary_mm(x, weight.packed, n) != (x_signs @ w_signs.T).int()).sum())
    return [f"{wrong} sums of signs differ"] if wrong else []


CHECKS = {"s8": products, "b1": sign_products}


def named(operands: str) -> list[str]:
    """Returns the Hopper kernels of csrc/cuda/sm90/kernels.inc for "s8" or "b1" operands."""
    text = (ROOT / "csrc" / "cuda" / "sm90" / "kernels.inc").read_text()
    return re.findall(rf"^QFX_{operands.upper()}\((\w+),", text, re.M)


def forced(kernel: str) -> Any:
    """Runs products on this kernel inside the context; qfx reads the variable at every call."""
    return mock.patch.dict(os.environ, {VARIABLE: kernel})


def kernels(session: Session) -> Iterator[Row]:
    """Compares each kernel with exact sums. `ok`: whether the following stages time it."""
    for operands in CHECKS:
        for kernel in [PORTABLE, *([] if session.dry else named(operands))]:
            yield {"operands": operands, "kernel": kernel, **checked(session, operands, kernel)}


def checked(session: Session, operands: str, kernel: str) -> Row:
    """Returns what the process of a kernel found. In a dry run it may take all the time, because
    the machine may be busy."""
    limit = session.left if session.dry else min(LIMIT, session.left)
    own: Row = {"environment": {VARIABLE: kernel}, "limit_s": limit}
    try:
        found: Row = call(check, operands, session.device.type, **own)
    except FailedError as why:
        return {"ok": False, "result": str(why)}
    return {"ok": not found["wrong"], **found}


def check(operands: str, device: str) -> Row:
    torch.manual_seed(0)
    rows, *others = TINY if device == "cpu" else (M, N, K)
    wrong = []
    for n, k in product(*others):
        weight = Weight.of(operands, n, k, device)
        for m in rows:
            wrong += [f"{m}x{k}x{n}: {what}" for what in CHECKS[operands](weight, m, device)]
    cases = len(rows) * len(others[0]) * len(others[1])
    return {"cases": cases, "wrong": len(wrong), "first": wrong[:3]}


def right(session: Session, operands: str) -> list[str]:
    """Returns the kernels that the stage found correct."""
    rows = session.of("kernels")
    return [row["kernel"] for row in rows if row.get("operands") == operands and row["ok"]]


def choices(names: list[str], m: int) -> list[str]:
    """Returns the choices worth timing for m rows, of the correct kernels: Hopper kernels with
    splits of K, and the portable one. A kernel with swapped operands is named by the rows of x in
    its tile."""
    small, least, widest = m <= SMALL_M, m // MOST_TILES, max(16, 2 * m)
    found = [PORTABLE] if PORTABLE in names else []
    for name in names:
        tokens = int(name.partition("swap")[2] or 0)
        fits = least <= tokens <= widest if tokens else not small
        if name != PORTABLE and fits:
            found += [f"{name}/{s}" for s in (SPLITS if small else SPLITS[:1])]
    return found
