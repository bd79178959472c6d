"""Linears: what of them is timed, and how their times follow from it.

The grid's sizes are even. What uneven ones cost is measured apart: in float columns beyond a
multiple of BLOCK, in int8 features beyond one of VECTOR.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from qfx.cost.grid_timing import ROUNDS, Timing, apart, random, weights
from qfx.cost.model import Estimate, Work
from qfx.cost.table import Table
from qfx.cost.timing import fastest
from qfx.ops.forms import DYNAMIC, FLOAT, of_scheme
from qfx.ops.header import PANEL
from qfx.ops.packing import Packing
from qfx.values.scheme import QSpec, Scheme
from qfx.weights.cache import pack

AXES = ((1, 2, 4, 16, 64, 256), (32, 128, 1024, 2048, 4096), (32, 128, 512, 2048, 4096))  # M, K, N
SPARSE_AXES = ((1, 8, 64, 256), (64, 512, 2048), (32, 256, 2048))
GROUP = 64  # elements of K that share a scale, where some do
BLOCK = 16  # columns that float libraries take at once
VECTOR = 32  # a divisor of the features that int8 kernels take at once
ASYMMETRIC = QSpec(symmetric=False)


def column(scheme: Scheme, k: int, n: int, dtype: torch.dtype) -> Timing:
    """Of bias-free linears of this scheme, each of another weight, as in a model: few rows take as
    long as reading it does."""
    floats = weights(n, k, dtype)
    packed = pack(floats[0], (), Packing(scheme.w, group=scheme.group))
    each = apart(packed.weight)

    def timed(m: int) -> list[float]:
        x, w = random(m, k, dtype), itertools.cycle(floats)
        calls = itertools.cycle([in_int8(scheme, x, n, weight) for weight in each])
        return fastest(lambda: F.linear(x, next(w)), lambda: next(calls)(), rounds=ROUNDS)

    return timed


def in_int8(scheme: Scheme, x: Tensor, n: int, weight: Tensor) -> Callable[[], Tensor]:
    """The linear of a packed weight as its form runs it: nothing is left to do but to call the
    operator."""
    values = of_scheme(scheme, n, 0)
    values |= {"x": x, "weight": weight, "bias": None, "factor": None}
    values |= {"activation": "none", "out_dtype": x.dtype}
    whole = FLOAT if scheme.x is None else DYNAMIC
    operator, arguments = whole.operator, whole.arguments(values)
    return lambda: operator(*arguments)  # type: ignore[no-any-return]


def between_points(table: Table, work: Work) -> Estimate:
    """A size below the grid's smallest counts as that one. Smaller groups than those of the grid
    take at most as many times as long as there are more of them."""
    grids, group = (table.grids["float"], table.grids["int8"]), work.scheme and work.scheme.group
    float_s, int8_s = (g.linear(*g.within(work.m, work.k, work.n)) for g in grids)
    return Estimate(float_s, int8_s * max(GROUP / (group or GROUP), 1.0))


def with_corrections(table: Table, work: Work) -> Estimate:
    """Of a single int8 GEMM, which works on whole panels of columns."""
    m, k, n = work.m, work.k, work.n
    int8_s = table.grids["int8"].linear(m, k, -(-n // PANEL) * PANEL)
    if k % VECTOR:
        int8_s += m * table.numbers["uneven"][0]
    return Estimate(in_float(table, m, k, n), max(int8_s - _saving(table, work), int8_s / 2))


def in_float(table: Table, m: int, k: int, n: int) -> float:
    """Predicted seconds in float alone."""
    row = max(bisect_right(AXES[0], m) - 1, 0)
    more = table.numbers["columns"][BLOCK * row + n % BLOCK]
    return table.grids["float"].linear(m, k, n - n % BLOCK + more)


def _saving(table: Table, work: Work) -> float:
    """Seconds less than with scales and zero points found at every call."""
    x = work.x
    if x and x.static:
        return table.over("static", work.m, work.k) - table.numbers["static_call"][0]
    return work.m * table.numbers["symmetric"][0] if x and x.symmetric else 0.0
