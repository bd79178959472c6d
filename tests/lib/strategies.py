"""Hypothesis strategies: sizes at the edges of tiles, awkward strides, extreme fills; and the bound
on a quantization step that the laws share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import qfx
import qfx._C as _C
from qfx.ops.code import Code
from qfx.ops.quantize import code_range

TILE_EDGES = [a + b for a in (4, 12, 16, 32, 64, 128) for b in (-1, 0, 1)]
SIZES = st.sampled_from(sorted({0, 1, 2, 5, 7, 13, 29, 97, *TILE_EDGES}))
POSITIVE = SIZES.filter(bool)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SEEDS = st.integers(0, 2**31 - 1)
ISAS = st.sampled_from(_C.isas())
BITS = st.integers(2, 8)
AXES = st.sampled_from([[1], [0, 1]])
FLAG = st.integers(0, 1)
OF_ROWS = st.tuples(BITS, FLAG).map(lambda drawn: Code(*drawn))
CODES = st.tuples(BITS, FLAG, FLAG).map(lambda drawn: Code(*drawn))  # of rows, or of a tensor
FINITE = (
    "normal", "wide", "equal", "zero", "zero_rows", "one_sided", "denormal", "huge", "largest",
    "powers", "outlier",
)  # fmt: skip
FAULTY = ("nan", "infinity")  # in some of the rows
LARGEST = torch.finfo(torch.float32).max


def filled(fill: str, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Returns float32 [rows, columns] with the given fill, one of FINITE or FAULTY."""
    x = torch.randn(rows, columns, generator=generator)
    rare = torch.rand(x.shape, generator=generator) < 0.03
    made = {
        "normal": lambda: x,
        "wide": lambda: x * torch.exp(8 * torch.randn(rows, 1, generator=generator)),
        "equal": lambda: torch.full_like(x, 3.7),
        "zero": lambda: torch.zeros_like(x),
        "zero_rows": lambda: x * (torch.arange(rows) % 3 == 0)[:, None],
        "one_sided": lambda: x.abs() + 5,
        "denormal": lambda: x * 2.0**-140,
        "huge": lambda: x.sign() * 1e38,
        "largest": lambda: x.sign() * LARGEST * (1 - x.abs() * 2.0**-12),
        "powers": lambda: x.sign() * 2.0 ** torch.randint(-20, 20, x.shape, generator=generator),
        "outlier": lambda: torch.where(rare, 1e4, x),
        "nan": lambda: x + torch.where(rare, torch.nan, 0.0),
        "infinity": lambda: x + torch.where(rare, x / 0, 0.0),
    }
    return made[fill]()


def strided(x: Tensor, layout: str) -> Tensor:
    """Returns the same values in another memory layout; `expanded` repeats the first row
    instead."""
    rows, columns = x.shape
    if layout == "expanded":
        return x[:1].expand(rows, columns)
    if layout == "transposed":
        return x.t().contiguous().t()
    if layout == "slice":  # of a wider and taller buffer, at an unaligned address
        wide = torch.zeros(rows + 2, columns + 3, dtype=x.dtype)
        wide[1 : rows + 1, 3:] = x
        return wide[1 : rows + 1, 3:]
    return x


LAYOUTS = st.sampled_from(["contiguous", "transposed", "slice", "expanded"])


@st.composite
def matrices(
    draw: st.DrawFn, rows: st.SearchStrategy[int] = SIZES, fills: tuple[str, ...] = FINITE
) -> Tensor:
    """Draws a float32 matrix [rows, columns] of some fill and layout."""
    m, k, fill = draw(rows), draw(SIZES), draw(st.sampled_from(fills))
    generator = torch.Generator().manual_seed(draw(SEEDS))
    return strided(filled(fill, m, k, generator), draw(LAYOUTS))


@st.composite
def codes(draw: st.DrawFn, rows: int, columns: int) -> Tensor:
    """Draws int8 [rows, columns]: random, or the extremes that overflow careless kernels."""
    generator = torch.Generator().manual_seed(draw(SEEDS))
    fill = draw(st.sampled_from(["random", "lowest", "highest", "extremes"]))
    shape = (rows, columns)
    if fill == "random":
        q = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    elif fill == "extremes":
        picks = torch.randint(0, 4, shape, generator=generator)
        q = torch.tensor([-128, -127, 127, 0], dtype=torch.int8)[picks]
    else:
        q = torch.full(shape, -128 if fill == "lowest" else 127, dtype=torch.int8)
    return strided(q, draw(LAYOUTS))


def step_error(scale: Tensor, bits: int, symmetric: bool) -> Tensor:
    """Bounds how far dequantized codes are from the values they represent. (B1)"""
    qmin, qmax = code_range(bits, symmetric)
    return scale.double() * (0.5 + (qmax - qmin) * 2.0**-21)


# --- schemes of modules ---

FLAGS = st.booleans()
GRIDS = st.sampled_from([qfx.PER_ROW, qfx.PER_TENSOR, qfx.PER_COLUMN])
X_SPECS = st.none() | st.builds(qfx.QSpec, BITS, FLAGS)
X_SPECS |= st.builds(qfx.QSpec, BITS, FLAGS, st.just(qfx.PER_TENSOR), st.just(0), FLAGS)
X_SPECS |= st.builds(qfx.QSpec, BITS, FLAGS, st.just(qfx.PER_ROW), st.sampled_from([32, 64]))
FLAT = st.builds(qfx.QSpec, BITS, st.just(True), GRIDS)
GROUPED = st.builds(qfx.QSpec, BITS, FLAGS, st.just(qfx.PER_ROW), st.sampled_from([0, 32, 64]))
FEW_BITS, SIZED = st.sampled_from([4, 5]), st.sampled_from([32, 64, 128])
PACKED = st.builds(
    qfx.QSpec, FEW_BITS, FLAGS, st.just(qfx.PER_ROW), SIZED, st.just(False), st.just(True)
)


@st.composite
def recipes(draw: st.DrawFn, n: int, k: int) -> qfx.SiteRecipe:
    """Draws any scheme that a module can have, with the values that it requires and some optional
    ones."""
    x = draw(X_SPECS)
    w = draw(FLAT | PACKED if x is None else FLAT | GROUPED | PACKED)
    if x is not None and x.group:
        group = x.group if w.packed else draw(st.sampled_from([0, x.group]))
        w = replace(w, axes=qfx.PER_ROW, group=group)
    plain = not (w.grouped or (x is not None and x.group))
    backward = draw(st.sampled_from(["float", "int8"])) if plain else "float"
    scheme = qfx.Scheme(x, w, backward, draw(st.sampled_from([0, 16, 64])))
    given: dict[str, Any] = {}
    if w.axes != qfx.PER_COLUMN and draw(FLAGS):
        factors = st.lists(st.floats(0.5, 2, width=32), min_size=k, max_size=k)
        given["factor"] = tuple(draw(factors))
    if x is not None and x.static:
        given["scale"] = draw(st.floats(2.0**-10, 1.0, width=32))
        half = 2 ** (x.bits - 1)
        given["zero_point"] = (
            None if x.symmetric else draw(st.none() | st.integers(-half, half - 1))
        )
    return qfx.SiteRecipe("0", 0, n, k, scheme, **given)
