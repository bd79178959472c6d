"""The cost tables of this GPU, in the form that qfx/cost/gpu.py reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import machine
from benchmarks.gpu.clock import Call, seconds
from benchmarks.gpu.kernels import forced
from benchmarks.gpu.operands import GROUPS, OPS, ROWS, Linear, calls, copies
from benchmarks.gpu.session import Row, Session
from benchmarks.gpu.sweep import nearest
from qfx.cost.gpu import BATCHED, PASSES, PRODUCTS, SCHEMA, slug
from qfx.cost.grid import Grid
from qfx.cost.table import Table
from qfx.io.atomic_write import write_text
from qfx.ops.code import Code
from qfx.rewriting.aten_quantization import quantize_parts
from qfx.weights.cache import pack

M, K, N = (1, 8, 16, 64, 256, 1024, 8192), (512, 2048, 4096, 14336), (256, 1024, 4096, 14336)
M_OF_PASSES = (16, 256, 1024, 8192)  # one row would be compiled for itself
BATCH, BATCHED_AXES = 64, ((128, 1024), (64, 128, 1024), (128, 1024))
DTYPES = (torch.bfloat16, torch.float16)
METHODS = {  # of `Linear`, by how its weight is packed
    ROWS: {"float": "in_float", "int8": "product", "weight_only": "weight_only"},
    GROUPS: {"groups": "product"},
}


def axes_of(session: Session) -> dict[str, tuple[tuple[int, ...], ...]]:
    mkn = ((1, 16), (64, 128), (64, 128)) if session.dry else (M, K, N)
    batched = ((16, 32), (16, 32), (16, 32)) if session.dry else BATCHED_AXES
    return {"mkn": mkn, "batched": batched, "mk": mkn[:2] if session.dry else (M_OF_PASSES, K)}


def cost_rows(session: Session) -> Iterator[Row]:
    """Yields one row for each point. Passes come first, because nothing can be predicted without
    them. The rows of float16 are those of bfloat16, which moves as many bytes."""
    axes = axes_of(session)
    for what in PASSES:
        for k in axes["mk"][1]:
            timed = _pass(session, what, k)
            for m in axes["mk"][0]:
                yield from _both({"what": what, "sizes": [m, k], "s": timed(m)})
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        for sizes in product(*axes["mkn"]):
            for what, s in _products(session, dtype, *sizes).items():
                yield {"dtype": name, "what": what, "sizes": [*sizes], "s": s}
        for sizes in product(*axes["batched"]):
            for what, s in _batched(session, dtype, *sizes).items():
                yield {"dtype": name, "what": what, "sizes": [*sizes], "s": s}
        yield {"dtype": name, "what": "training", "s": _training(session, dtype)}


def _both(row: Row) -> Iterator[Row]:
    return ({"dtype": dtype, **row} for dtype in ("bfloat16", "float16"))


def _pass(session: Session, what: str, k: int) -> Callable[[int], float]:
    """Returns a function from M to the seconds of a pass over [M, k], compiled by Inductor only if
    it consists of aten operators."""
    torch._dynamo.reset()  # each K is compiled for itself: together they would be too many
    scale = torch.tensor([0.02], device=session.device)
    aten: dict[str, Callable[[Tensor], Any]] = {
        "quantize": lambda x: quantize_parts(x, Code(symmetric=0)),
        "tensor": lambda x: quantize_parts(x, Code(symmetric=0, per_tensor=1)),
        "static": lambda x: quantize_parts(x, Code(), scale),
    }
    operators: dict[str, Callable[[Tensor], Any]] = {
        "rotated": lambda x: OPS.quantize(x, list(Code(symmetric=0, rotation=64))),
        "rotate": lambda x: OPS.rotate(x, None, 64),
    }
    call = operators.get(what) or _compiled(session, aten[what])

    def timed(m: int) -> float:
        x = session.random(m, k)
        torch._dynamo.mark_static(x, 1)
        return seconds([partial(call, x)], session.device)

    return timed


def _compiled(session: Session, f: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Compiles a function for any number of rows, but for this K alone, as in a model."""
    return torch.compile(f, backend="eager" if session.dry else "inductor", dynamic=True)


def _products(session: Session, dtype: torch.dtype, m: int, k: int, n: int) -> dict[str, float]:
    found = {}
    for packing, methods in METHODS.items():
        linears = copies(session, partial(Linear.random, session, m, k, n, dtype, packing))
        with forced(nearest(session, m, k, n)):
            for what, method in methods.items():
                found[what] = seconds(calls(linears, method), session.device)
    return found


def _batched(session: Session, dtype: torch.dtype, m: int, k: int, n: int) -> dict[str, float]:
    a, b = (session.random(BATCH, rows, k, dtype=dtype) for rows in (m, n))
    how = ([1], 8, False, 8, dtype)
    pair: tuple[Call, Call] = (lambda: a @ b.mT, lambda: OPS.int8_bmm_dynamic(a, b, *how))
    return {w: seconds([c], session.device) for w, c in zip(BATCHED, pair, strict=True)}


def _training(session: Session, dtype: torch.dtype) -> list[float]:
    """Returns the seconds per element of quantizing and packing a weight and quantizing it again
    for the backward, and of dequantizing codes in the backward."""
    size = session.size(4096)
    w = session.random(size, size, dtype=dtype)
    q, scale, zero = OPS.quantize(w, list(Code(symmetric=0)))
    like = (scale, zero, None, None, "none", dtype)
    timed: tuple[Call, ...] = (
        lambda: pack(w, (), ROWS),
        lambda: OPS.fake_quantize(w, [1], 8, True, dtype),
        lambda: OPS.dequantize(q, *like),
    )
    weight, again, codes = (seconds([call], session.device) for call in timed)
    return [(weight + again) / size**2, codes / size**2]


def write_table(session: Session) -> Path | None:
    """Writes qfx/cost/<name>.json with the dtypes that are complete; returns None if there are
    none."""
    axes, points = axes_of(session), {}
    for row in session.of("cost"):
        if "what" in row and row["what"] != "training":
            points[row["dtype"], row["what"], tuple(row["sizes"])] = row["s"]
    training = {r["dtype"]: r["s"] for r in session.of("cost") if r.get("what") == "training"}
    tables = {
        dtype: Table(
            {w: Grid(of, _nested(points, (dtype, w), of)) for w, of in _axes_by_grid(axes)},
            {"training": per_element, "batch": (BATCH,)},
        )
        for dtype, per_element in training.items()
    }
    if not tables:
        return None
    host = {key: machine()[key] for key in ("torch", "commit", "uncommitted_changes")}
    head = {"schema": SCHEMA, "gpu": session.name, **host}
    path = session.out / f"{slug(session.name)}.json"
    write_text(path, _text(head, tables))
    return path


def _text(head: Row, tables: dict[str, Table]) -> str:
    """Returns JSON with one dtype per line."""
    each = ",\n".join(f'"{dtype}": {table.text()}' for dtype, table in tables.items())
    return f'{json.dumps(head)[:-1]}, "tables": {{\n{each}}}}}\n'


def _axes_by_grid(axes: dict[str, Any]) -> Iterator[tuple[str, tuple[tuple[int, ...], ...]]]:
    for names, which in ((PRODUCTS, "mkn"), (BATCHED, "batched"), (PASSES, "mk")):
        yield from ((name, axes[which]) for name in names)


def _nested(points: dict[Any, float], key: tuple[str, str], axes: Any, *at: int) -> Any:
    if not axes:
        return float(f"{points[(*key, at)]:.4g}")
    return [_nested(points, key, axes[1:], *at, p) for p in axes[0]]
