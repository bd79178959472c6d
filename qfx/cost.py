"""Cost: what a matmul takes on this machine in float and in int8, measured once, kept on disk.

A grid of shapes is timed with the real operators, and the time of a site is interpolated from it.
Its sizes are even. What uneven ones cost is measured apart: in float columns beyond a multiple of
BLOCK, in int8 features beyond one of VECTOR.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import torch.nn.functional as F

import qfx._C as _C
from qfx.batch_cost import attention_table, bmm_table, decode_table
from qfx.form_cost import form, form_table
from qfx.grid import (
    ROUNDS,
    Column,
    Grid,
    checked_grid,
    interpolate,
    kept,
    measured_grids,
    random,
    undisturbed,
)
from qfx.ops.weight import PANEL
from qfx.packing import Packing
from qfx.plan import Estimate
from qfx.scheme import QSpec, Scheme
from qfx.timing import fastest
from qfx.weights import pack

AXES = ((1, 2, 4, 16, 64, 256), (32, 128, 1024, 2048, 4096), (32, 128, 512, 2048, 4096))  # M, K, N
BLOCK = 16  # columns that float libraries take at once
VECTOR = 32  # a divisor of the features that int8 kernels take at once


@dataclass(frozen=True)
class CostTable:
    """Seconds of a bias-free linear on the grid of AXES."""

    float_s: Grid
    int8_s: Grid  # int8_linear_dynamic, asymmetric
    columns: tuple[tuple[float, ...], ...]  # for each M: what 0, 1, .. BLOCK columns count for
    uneven_s: float  # seconds per row of activations whose K is no multiple of VECTOR
    symmetric_saving: float  # seconds per row of activations that a symmetric scheme saves
    weight_s: float  # seconds per element to quantize and pack a weight, and again for backward
    codes_s: float  # seconds per element to dequantize activations in the backward
    rotation_s: float  # seconds per element that rotating the activations adds

    def estimate(self, m: int, k: int, n: int, dtype: torch.dtype, scheme: Scheme) -> Estimate:
        """Predicted times of x [m, k] @ w [n, k].T; the table belongs to one dtype."""
        whole = -(-n // PANEL) * PANEL  # int8 works on whole panels of columns
        int8_s = interpolate(self.int8_s, AXES, (m, k, whole))
        if k % VECTOR:
            int8_s += self.uneven_s * m
        if scheme.x and scheme.x.symmetric:
            int8_s = max(int8_s - self.symmetric_saving * m, int8_s / 2)
        int8_s += self.transform(m, k, scheme)
        columns = self.columns[max(bisect_right(AXES[0], m) - 1, 0)]
        return Estimate(
            interpolate(self.float_s, AXES, (m, k, n - n % BLOCK + columns[n % BLOCK])), int8_s
        )

    def transform(self, m: int, k: int, scheme: Scheme) -> float:
        """Seconds to rotate x [m, k]; the smaller block counts as the larger one."""
        return self.rotation_s * m * k if scheme.block(k) else 0.0

    def training(self, m: int, k: int, n: int) -> float:
        """Seconds that a training step adds to the int8 forward of a weight that trains."""
        return n * k * self.weight_s + m * k * self.codes_s


class MachineCost:
    """The cost model of this machine: one table per dtype, thread count and instruction set."""

    def estimate(self, m: int, k: int, n: int, dtype: torch.dtype, scheme: Scheme) -> Estimate:
        machine = (dtype, torch.get_num_threads(), _C.isa())
        name = form(scheme)
        if name is None:
            return table(*machine).estimate(m, k, n, dtype, scheme)
        found = form_table(name, *machine).estimate(m, k, n)
        transform = table(*machine).transform(m, k, scheme) if scheme.block(k) else 0.0
        return Estimate(found.float_s, found.int8_s + transform)

    def training(self, m: int, k: int, n: int, dtype: torch.dtype) -> float:
        return table(dtype, torch.get_num_threads(), _C.isa()).training(m, k, n)

    def estimate_bmm(self, batch: int, m: int, k: int, n: int, dtype: torch.dtype) -> Estimate:
        """Predicted times of a [batch, m, k] @ b [batch, n, k].mT, both computed."""
        return bmm_table(dtype, torch.get_num_threads(), _C.isa()).estimate(batch, m, k, n)

    def estimate_attention(
        self, batch: int, m: int, k: int, n: int, dtype: torch.dtype
    ) -> Estimate:
        """Predicted times of `batch` attentions of m queries and n keys with k features."""
        return attention_table(dtype, torch.get_num_threads(), _C.isa()).estimate(batch, m, k, n)

    def estimate_decode(self, batch: int, k: int, n: int, dtype: torch.dtype) -> float:
        """How many times as fast as PyTorch's attention of one query `attention_decode` is."""
        found = decode_table(dtype, torch.get_num_threads(), _C.isa())
        return found.estimate(batch, 1, k, n).gain


@lru_cache
def table(dtype: torch.dtype, threads: int, isa: str) -> CostTable:
    """Reads the table from the cache directory, or measures and keeps it (about two seconds)."""
    return kept("cost", (dtype, threads, isa), _from_json, lambda: measure(dtype))


def _from_json(text: str) -> CostTable:
    raw = json.loads(text)
    float_s, int8_s = (checked_grid(raw[name], AXES) for name in ("float_s", "int8_s"))
    columns = tuple(tuple(map(float, of_m)) for of_m in raw["columns"])
    if [len(of_m) for of_m in columns] != [BLOCK] * len(AXES[0]):
        raise ValueError("the kept table lacks columns")
    others = ("uneven_s", "symmetric_saving", "weight_s", "codes_s", "rotation_s")
    return CostTable(float_s, int8_s, columns, *(float(raw[name]) for name in others))


def measure(dtype: torch.dtype) -> CostTable:
    """Times the grid with the operators themselves, float and int8 in turns."""
    with undisturbed():
        grids = measured_grids(AXES, lambda k, n: _column(k, n, dtype))
        columns = tuple(_columns(m, dtype) for m in AXES[0])
        rows = (_uneven(dtype), _symmetric_saving(dtype))
        weight, codes = _training(dtype)
        return CostTable(*grids, columns, *rows, weight, codes, _rotation(dtype))


def _column(k: int, n: int, dtype: torch.dtype) -> Column:
    w, op = random(n, k, dtype), torch.ops.qfx.int8_linear_dynamic
    packed = pack(w, (), Packing(QSpec())).tensors

    def timed(m: int) -> list[float]:
        x = random(m, k, dtype)
        return fastest(
            lambda: F.linear(x, w),
            lambda: op(x, *packed, None, [1], 8, False, "none", dtype),
            rounds=ROUNDS,
        )

    return timed


def _columns(m: int, dtype: torch.dtype, k: int = 512, n: int = 4 * BLOCK) -> tuple[float, ...]:
    """What 0, 1, .. columns beyond a multiple of BLOCK count for, in those of a whole block."""
    x, weights = random(m, k, dtype), [random(n + i, k, dtype) for i in range(BLOCK + 1)]
    none, *times = fastest(*(partial(F.linear, x, w) for w in weights))
    whole = max(times[-1] - none, 1e-9)
    return (0.0, *(BLOCK * max(t - none, 0.0) / whole for t in times[:-1]))


def _uneven(dtype: torch.dtype, m: int = 256, k: int = 2 * VECTOR, n: int = PANEL) -> float:
    """Between two multiples of VECTOR, less what the features themselves take."""
    even, uneven, next_even = (_column(k + i, n, dtype)(m)[1] for i in (0, 20, VECTOR))
    return max(uneven - (even + next_even) / 2, 0.0) / m


def _symmetric_saving(dtype: torch.dtype, m: int = 1024, k: int = 64) -> float:
    """Both kinds make the same pass over a row; a zero point costs a little more for each row."""
    x = random(m, k, dtype)
    asymmetric, symmetric = fastest(
        lambda: torch.ops.qfx.quantize(x, [1], 8, False),
        lambda: torch.ops.qfx.quantize(x, [1], 8, True),
    )
    return max(asymmetric - symmetric, 0.0) / m


def _rotation(dtype: torch.dtype, m: int = 256, k: int = 512) -> float:
    """What rotated blocks of 64 add to the pass that quantizes."""
    x = random(m, k, dtype)
    plain, rotated = fastest(
        lambda: torch.ops.qfx.quantize(x, [1], 8, True),
        lambda: torch.ops.qfx.quantize(x, [1], 8, True, None, 64),
    )
    return max(rotated - plain, 0.0) / (m * k)


def _training(dtype: torch.dtype, size: int = 512) -> list[float]:
    """Per element: what a weight costs in both directions, and dequantizing activations."""
    w = random(size, size, dtype)
    q, scale, zero_point = torch.ops.qfx.quantize(w, [1], 8, False)
    like = (scale, zero_point, None, None, "none", dtype)
    weight, again, codes = fastest(
        lambda: pack(w, (), Packing(QSpec())),
        lambda: torch.ops.qfx.fake_quantize(w, [1], 8, True, dtype),
        lambda: torch.ops.qfx.dequantize(q, *like),
    )
    return [(weight + again) / size**2, codes / size**2]
