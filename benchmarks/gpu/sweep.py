"""The fastest correct kernel by shape: the rows of csrc/cuda/sm90/measured.inc."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.gpu.clock import Call, seconds
from benchmarks.gpu.correctness import right
from benchmarks.gpu.kernels import PORTABLE, choices, forced
from benchmarks.gpu.operands import OPS, Linear, calls, copies
from benchmarks.gpu.session import Row, Session

# K, N of projections, MLPs and a vocabulary of 7 and 8 billion parameters
LAYERS = ((4096, 4096), (4096, 14336), (14336, 4096), (4096, 1024), (2048, 2048), (8192, 8192))
ROWS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192)
SIGNS = ((4096, 4096),)
KINDS = {"s8": "kCodes", "b1": "kBits"}  # the names of sm90::Operands
BITS = {"s8": 8, "b1": 1}


def sweep(session: Session) -> Iterator[Row]:
    """Yields for each shape the best choice, and the times of all choices."""
    for operands, layers in (("s8", LAYERS), ("b1", SIGNS)):
        names = right(session, operands)
        for k, n in layers[:1] if session.dry else layers:
            for m in ROWS[:2] if session.dry else ROWS:
                yield _best(session, operands, names, m, session.size(k), session.size(n))


def _best(session: Session, operands: str, names: list[str], m: int, k: int, n: int) -> Row:
    timed = {}
    what = _calls(session, operands, m, k, n)
    for kernel in choices(names, m):
        with forced(kernel):
            timed[kernel] = seconds(what, session.device)
    best = min(timed, key=timed.__getitem__) if timed else None
    us = {kernel: round(s * 1e6, 2) for kernel, s in timed.items()}
    return {"operands": operands, "m": m, "k": k, "n": n, "best": best, "us": us}


def _calls(session: Session, operands: str, m: int, k: int, n: int) -> list[Call]:
    linears = copies(session, partial(Linear.random, session, m, k, n))
    if operands == "s8":
        return calls(linears, "product")
    x, packed = linears[0].x.float(), OPS.binary_pack(linears[0].w.float())
    return [partial(OPS.binary_mm, x, packed, n)]


def nearest(session: Session, m: int, k: int, n: int) -> str:
    """Returns the kernel that csrc/cuda/sm90/choice.cpp chooses with these rows: that of the
    nearest sizes. A measured m below the requested one adds an octave to the distance."""
    rows = [r for r in session.of("sweep") if r.get("operands") == "s8" and r["best"]]

    def distance(row: Row) -> float:
        pairs = ((row["m"], m), (row["k"], k), (row["n"], n))
        return sum(abs(math.log2(a) - math.log2(b)) for a, b in pairs) + (row["m"] < m)

    return min(rows, key=distance)["best"] if rows else PORTABLE


def write_measured(session: Session) -> Path:
    """Writes measured.inc in the format described by its comment."""
    rows = [_line(session.name, row) for row in session.of("sweep") if row.get("best")]
    path = session.out / "measured.inc"
    path.write_text("".join(f"{row}\n" for row in rows))
    return path


def _line(gpu: str, row: Row) -> str:
    kernel, _, splits = row["best"].partition("/")
    kind, k_bytes = KINDS[row["operands"]], -(-row["k"] * BITS[row["operands"]] // 8)
    sizes = f"{{1, {row['m']}, {row['n']}, {k_bytes}}}"
    return f'{{"{gpu}", sm90::Operands::{kind}, {sizes}, {{"{kernel}", {splits or 1}}}}},'
