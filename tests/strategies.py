"""Hypothesis strategies: sizes at the edges of tiles, awkward strides, extreme fills."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

TILE_EDGES = [a + b for a in (4, 12, 16, 32, 64) for b in (-1, 0, 1)]
SIZES = st.sampled_from(sorted({0, 1, 2, 5, 7, 13, 29, 97, *TILE_EDGES}))
POSITIVE = SIZES.filter(bool)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SEEDS = st.integers(0, 2**31 - 1)
FILLS = ("normal", "wide", "equal", "zero", "one_sided", "denormal", "huge", "powers", "outlier")


def _filled(fill: str, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    x = torch.randn(rows, columns, generator=generator)
    made = {
        "normal": lambda: x,
        "wide": lambda: x * torch.exp(8 * torch.randn(rows, 1, generator=generator)),
        "equal": lambda: torch.full_like(x, 3.7),
        "zero": lambda: torch.zeros_like(x),
        "one_sided": lambda: x.abs() + 5,
        "denormal": lambda: x * 2.0**-140,
        "huge": lambda: x.sign() * 1e38,
        "powers": lambda: x.sign() * 2.0 ** torch.randint(-20, 20, x.shape, generator=generator),
        "outlier": lambda: torch.where(torch.rand(x.shape, generator=generator) < 0.03, 1e4, x),
    }
    return made[fill]()


def strided(x: Tensor, layout: str) -> Tensor:
    """The same values in memory of another shape."""
    rows, columns = x.shape
    if layout == "transposed":
        return x.t().contiguous().t()
    if layout == "slice":  # of a wider and taller buffer, at an unaligned address
        wide = torch.zeros(rows + 2, columns + 3, dtype=x.dtype)
        wide[1 : rows + 1, 3:] = x
        return wide[1 : rows + 1, 3:]
    return x


LAYOUTS = st.sampled_from(["contiguous", "transposed", "slice"])


@st.composite
def matrices(draw: st.DrawFn, rows: st.SearchStrategy[int] = SIZES) -> Tensor:
    """A float32 matrix [rows, columns] of some fill and layout."""
    m, k, fill = draw(rows), draw(SIZES), draw(st.sampled_from(FILLS))
    generator = torch.Generator().manual_seed(draw(SEEDS))
    return strided(_filled(fill, m, k, generator), draw(LAYOUTS))


@st.composite
def codes(draw: st.DrawFn, rows: int, columns: int) -> Tensor:
    """int8 [rows, columns]: random, or the extremes that overflow careless kernels."""
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
