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
from benchmarks.gpu.check import forced
from benchmarks.gpu.products import GROUPS, OPS, ROWS, calls, copies, nearest
from benchmarks.gpu.session import Call, Row, Session
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
    """Returns the axes of each grid, by its name."""
    mkn = ((1, 16), (64, 128), (64, 128)) if session.dry else (M, K, N)
    batched = ((16, 32), (16, 32), (16, 32)) if session.dry else BATCHED_AXES
    passes = mkn[:2] if session.dry else (M_OF_PASSES, K)
    pairs = ((PRODUCTS, mkn), (BATCHED, batched), (PASSES, passes))
    return {name: axes for names, axes in pairs for name in names}


def cost_rows(session: Session) -> Iterator[Row]:
    """Yields one row for each point. Passes come first, because nothing can be predicted without
    them. The rows of float16 are those of bfloat16, which moves as many bytes."""
    axes = axes_of(session)
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in DTYPES}
    for what in PASSES:
        for k in axes[what][1]:
            timed = _pass(session, what, k)
            for m in axes[what][0]:
                row = {"what": what, "sizes": [m, k], "s": timed(m)}
                yield from ({"dtype": name, **row} for name in names.values())
    for dtype, name in names.items():
        for measured, first in ((_products, PRODUCTS[0]), (_batched, BATCHED[0])):
            for sizes in product(*axes[first]):
                for what, s in measured(session, dtype, *sizes).items():
                    yield {"dtype": name, "what": what, "sizes": [*sizes], "s": s}
        yield {"dtype": name, "what": "training", "s": _training(session, dtype)}


def _pass(session: Session, what: str, k: int) -> Callable[[int], float]:
    """Returns a function from M to the seconds of a pass over [M, k]. Passes of aten operators are
    compiled by Inductor for any number of rows, but for this K alone, as in a model."""
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
    inner = "eager" if session.dry else "inductor"
    call = operators.get(what) or torch.compile(aten[what], backend=inner, dynamic=True)

    def timed(m: int) -> float:
        x = session.random(m, k)
        torch._dynamo.mark_static(x, 1)
        return session.seconds(partial(call, x))

    return timed


def _products(session: Session, dtype: torch.dtype, m: int, k: int, n: int) -> dict[str, float]:
    found = {}
    for packing, methods in METHODS.items():
        linears = copies(session, m, k, n, dtype, packing)
        with forced(nearest(session, m, k, n)):
            for what, method in methods.items():
                found[what] = session.seconds(*calls(linears, method))
    return found


def _batched(session: Session, dtype: torch.dtype, m: int, k: int, n: int) -> dict[str, float]:
    a, b = (session.random(BATCH, rows, k, dtype=dtype) for rows in (m, n))
    how = ([1], 8, False, 8, dtype)
    pair: tuple[Call, Call] = (lambda: a @ b.mT, lambda: OPS.int8_bmm_dynamic(a, b, *how))
    return {what: session.seconds(call) for what, call in zip(BATCHED, pair, strict=True)}


def _training(session: Session, dtype: torch.dtype) -> list[float]:
    """Returns the seconds per element of quantizing and packing a weight and quantizing it again
    for the backward, and of dequantizing codes in the backward."""
    size = session.size(4096)
    w = session.random(size, size, dtype=dtype)
    q, scale, zero = OPS.quantize(w, list(Code(symmetric=0)))
    like = (scale, zero, None, None, "none", dtype)
    weight = session.seconds(lambda: pack(w, (), ROWS))
    again = session.seconds(lambda: OPS.fake_quantize(w, [1], 8, True, dtype))
    codes = session.seconds(lambda: OPS.dequantize(q, *like))
    return [(weight + again) / size**2, codes / size**2]


def write_table(session: Session) -> Path | None:
    """Writes qfx/cost/<name>.json with the dtypes that are complete, one a line; returns None if
    there are none."""
    rows = [row for row in session.of("cost") if "what" in row]
    training = {row["dtype"]: row["s"] for row in rows if row["what"] == "training"}
    points = {(r["dtype"], r["what"], *r["sizes"]): r["s"] for r in rows if "sizes" in r}
    if not training:
        return None
    tables = []
    for dtype, per_element in training.items():
        grids = {
            name: Grid(axes, _nested(points, axes, dtype, name))
            for name, axes in axes_of(session).items()
        }
        table = Table(grids, {"training": per_element, "batch": (BATCH,)})
        tables.append(f'"{dtype}": {table.text()}')
    host = {key: machine()[key] for key in ("torch", "commit", "uncommitted_changes")}
    head = json.dumps({"schema": SCHEMA, "gpu": session.name, **host})
    path = session.out / f"{slug(session.name)}.json"
    body = ",\n".join(tables)
    write_text(path, f'{head[:-1]}, "tables": {{\n{body}}}}}\n')
    return path


def _nested(points: dict[Any, float], axes: Any, *at: Any) -> Any:
    if not axes:
        return float(f"{points[at]:.4g}")
    return [_nested(points, axes[1:], *at, p) for p in axes[0]]
