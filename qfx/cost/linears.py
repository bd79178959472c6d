"""Times linears at the sizes of a grid, and predicts the time for other sizes.

The grid's sizes are even. The cost of uneven sizes is measured separately: in float for columns
beyond a multiple of BLOCK, in int8 for features beyond a multiple of VECTOR.
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
from qfx.cost.table import Times
from qfx.cost.timing import fastest
from qfx.ops.forms import DYNAMIC, FLOAT, of_scheme
from qfx.ops.header import PANEL
from qfx.ops.packing import Packing
from qfx.values.scheme import QSpec, Scheme
from qfx.weights.cache import pack

AXES = ((1, 2, 4, 16, 64, 256), (32, 128, 1024, 2048, 4096), (32, 128, 512, 2048, 4096))  # M, K, N
SPARSE_AXES = ((1, 8, 64, 256), (64, 512, 2048), (32, 256, 2048))
GROUP = 64  # elements of K that share a scale, for schemes with groups
BLOCK = 16  # columns that float libraries process at once
VECTOR = 32  # a divisor of the number of features that int8 kernels process at once
ASYMMETRIC = QSpec(symmetric=False)


def column(scheme: Scheme, k: int, n: int, dtype: torch.dtype) -> Timing:
    """Returns a function that times linears without bias [k, n] of this scheme for M rows: seconds
    in float and in int8. Each call uses another weight, as in a model: with few rows a call takes
    as long as reading the weight from memory."""
    floats = weights(n, k, dtype)
    packed = pack(floats[0], (), Packing(scheme.w, group=scheme.group))
    each = apart(packed.weight)

    def timed(m: int) -> list[float]:
        x, w = random(m, k, dtype), itertools.cycle(floats)
        calls = itertools.cycle([in_int8(scheme, x, n, weight) for weight in each])
        return fastest(lambda: F.linear(x, next(w)), lambda: next(calls)(), rounds=ROUNDS)

    return timed


def in_int8(scheme: Scheme, x: Tensor, n: int, weight: Tensor) -> Callable[[], Tensor]:
    """Returns a function that calls the int8 operator of a linear of this scheme, with all
    arguments prepared so that only the operator is timed."""
    values = of_scheme(scheme, n, 0)
    values |= {"x": x, "weight": weight, "bias": None, "factor": None}
    values |= {"activation": "none", "out_dtype": x.dtype}
    whole = FLOAT if scheme.x is None else DYNAMIC
    operator, arguments = whole.operator, whole.arguments(values)
    return lambda: operator(*arguments)  # type: ignore[no-any-return]


def between_points(table: Times, work: Work) -> Estimate:
    """Predicts the seconds by interpolation. A size below the grid's smallest counts as the
    smallest. If the scheme has smaller groups than the grid, its time is multiplied by the ratio of
    the numbers of groups, which is an upper bound."""
    grids, group = (table.grids["float"], table.grids["int8"]), work.scheme and work.scheme.group
    float_s, int8_s = (g.linear(*g.within(work.m, work.k, work.n)) for g in grids)
    return Estimate(float_s, int8_s * max(GROUP / (group or GROUP), 1.0))


def with_corrections(table: Times, work: Work) -> Estimate:
    """Predicts the seconds of a single int8 GEMM, which computes whole panels of output columns."""
    m, k, n = work.m, work.k, work.n
    int8_s = table.grids["int8"].linear(m, k, -(-n // PANEL) * PANEL)
    if k % VECTOR:
        int8_s += m * table.numbers["uneven"][0]
    return Estimate(in_float(table, m, k, n), max(int8_s - _saving(table, work), int8_s / 2))


def in_float(table: Times, m: int, k: int, n: int) -> float:
    """Returns the predicted seconds of a float GEMM [m, k] x [k, n]."""
    row = AXES[0][max(bisect_right(AXES[0], m) - 1, 0)]
    more = table.numbers[f"columns_{row}"][n % BLOCK] if n % BLOCK else 0.0
    return table.grids["float"].linear(m, k, n - n % BLOCK + more)


def _saving(table: Times, work: Work) -> float:
    """Returns the seconds saved by a static scale or a symmetric scheme, in comparison with scales
    and zero points computed at every call."""
    x = work.x
    if x and x.static:
        return table.over("static", work.m, work.k) - table.numbers["static_call"][0]
    return work.m * table.numbers["symmetric"][0] if x and x.symmetric else 0.0
