"""Cost: what a matmul takes on this machine in float and in int8, measured once, kept on disk.

A grid of shapes is timed with the real operators, and the time of a site is interpolated from it.
Its sizes are even. What uneven ones cost is measured apart: in float columns beyond a multiple of
BLOCK, in int8 features beyond one of VECTOR.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import qfx._C as _C
from qfx.cost import quantizing
from qfx.cost.batched import BatchTable, attention_table, bmm_table, decode_table
from qfx.cost.interpolation import (
    ROUNDS,
    Grid,
    Timing,
    checked_grid,
    interpolate,
    measured_grids,
    random,
    undisturbed,
)
from qfx.cost.model import Estimate
from qfx.cost.quantizing import Sweep
from qfx.cost.tables import LONGEST, kept, nested, seconds
from qfx.cost.timing import fastest
from qfx.cost.weight_storage import StorageTable, storage_of, storage_table
from qfx.ops.packing import Packing
from qfx.ops.weight import PANEL
from qfx.values.scheme import QSpec, Scheme
from qfx.weights.cache import pack

AXES = ((1, 2, 4, 16, 64, 256), (32, 128, 1024, 2048, 4096), (32, 128, 512, 2048, 4096))  # M, K, N
BLOCK = 16  # columns that float libraries take at once
VECTOR = 32  # a divisor of the features that int8 kernels take at once


ops = torch.ops.qfx


@dataclass(frozen=True)
class CostTable:
    """Seconds of a bias-free linear on the grid of AXES."""

    float_s: Grid
    int8_s: Grid  # int8_linear_dynamic, asymmetric
    columns: tuple[tuple[float, ...], ...]  # for each M: what 0, 1, .. BLOCK columns count for
    uneven_s: float  # seconds per row of activations whose K is no multiple of VECTOR
    symmetric_saving: float  # seconds per row of activations that a symmetric scheme saves
    static_saving: Sweep  # what a static scale saves, whose pass does not look for the range
    static_call_s: float  # seconds a call that it adds: two operators take the place of one
    pack_s: float  # seconds per element to quantize and pack a weight
    again_s: float  # seconds per element to quantize it again for the backward
    codes_s: float  # seconds per element to dequantize activations in the backward
    rotation: Sweep  # what rotating adds to the pass that quantizes
    turn: Sweep  # `rotate` by itself, there or back

    def estimate(self, m: int, k: int, n: int, dtype: torch.dtype, scheme: Scheme) -> Estimate:
        """Predicted times of x [m, k] @ w [n, k].T; the table belongs to one dtype."""
        whole = -(-n // PANEL) * PANEL  # int8 works on whole panels of columns
        int8_s = interpolate(self.int8_s, AXES, (m, k, whole))
        if k % VECTOR:
            int8_s += self.uneven_s * m
        int8_s = max(int8_s - self._saving(m, k, scheme), int8_s / 2) + self.transform(m, k, scheme)
        return Estimate(self.in_float(m, k, n), int8_s)

    def in_float(self, m: int, k: int, n: int) -> float:
        """Predicted seconds in float alone."""
        columns = self.columns[max(bisect_right(AXES[0], m) - 1, 0)]
        return interpolate(self.float_s, AXES, (m, k, n - n % BLOCK + columns[n % BLOCK]))

    def _saving(self, m: int, k: int, scheme: Scheme) -> float:
        if scheme.calibrated:
            return self.static_saving.over(m, k) - self.static_call_s
        return self.symmetric_saving * m if scheme.x and scheme.x.symmetric else 0.0

    def transform(self, m: int, k: int, scheme: Scheme) -> float:
        """Seconds to rotate x [m, k]; the smaller block counts as the larger one."""
        if not scheme.block(k):
            return 0.0
        return (self.turn if scheme.x is None else self.rotation).over(m, k)

    def packing(self, k: int, n: int, scheme: Scheme) -> float:
        """Seconds to quantize and pack a weight [n, k]."""
        return n * k * self.pack_s + (self.rotation.over(n, k) if scheme.block(k) else 0.0)

    def training(self, m: int, k: int, n: int, scheme: Scheme) -> float:
        """Seconds that a training step adds to the int8 forward of a weight that trains.

        Where K is rotated, so are the weight, in both directions, and both gradients back.
        """
        seconds = self.packing(k, n, scheme) + n * k * self.again_s + m * k * self.codes_s
        return seconds + (2 * self.turn.over(n, k) + self.turn.over(m, k)) * bool(scheme.block(k))


class Tables(NamedTuple):
    """Of one machine, each by (dtype, threads, instruction set), `storages` by a name before these.
    Those of this machine are read from the cache directory, or measured and kept."""

    linears: Callable[[torch.dtype, int, str], CostTable]
    storages: Callable[..., StorageTable] = storage_table
    products: Callable[[torch.dtype, int, str], BatchTable] = bmm_table
    attentions: Callable[[torch.dtype, int, str], BatchTable] = attention_table
    decodes: Callable[[torch.dtype, int, str], BatchTable] = decode_table


class MachineCost:
    """The cost model of a machine, this one by default, with the threads and the instruction set in
    use."""

    def __init__(self, tables: Tables | None = None) -> None:
        self.tables = tables or Tables(table)

    def estimate(
        self, m: int, k: int, n: int, dtype: torch.dtype, scheme: Scheme, outliers: int = 0
    ) -> Estimate:
        """Predicted times; `outliers` of the k columns are a float linear of their own."""
        machine, table = _here(dtype), self.tables.linears
        name, beside = storage_of(scheme), 0.0
        if outliers:
            beside = table(*machine).in_float(m, outliers, n)
        if name is None:
            found = table(*machine).estimate(m, k, n, dtype, scheme)
        else:
            found = self.tables.storages(name, *machine).estimate(m, k, n)
            beside += table(*machine).transform(m, k, scheme) if scheme.block(k) else 0.0
        return Estimate(found.float_s, found.int8_s + beside)

    def packing(self, k: int, n: int, dtype: torch.dtype, scheme: Scheme) -> float:
        return self.tables.linears(*_here(dtype)).packing(k, n, scheme)

    def training(self, m: int, k: int, n: int, dtype: torch.dtype, scheme: Scheme) -> float:
        return self.tables.linears(*_here(dtype)).training(m, k, n, scheme)

    def estimate_bmm(self, batch: int, m: int, k: int, n: int, dtype: torch.dtype) -> Estimate:
        """Predicted times of a [batch, m, k] @ b [batch, n, k].mT, both computed."""
        return self.tables.products(*_here(dtype)).estimate(batch, m, k, n)

    def estimate_attention(
        self, batch: int, m: int, k: int, n: int, dtype: torch.dtype
    ) -> Estimate:
        """Predicted times of `batch` attentions of m queries and n keys with k features."""
        return self.tables.attentions(*_here(dtype)).estimate(batch, m, k, n)

    def estimate_decode(self, batch: int, k: int, n: int, dtype: torch.dtype) -> float:
        """How many times as fast as PyTorch's attention of one query `attention_decode` is."""
        found = self.tables.decodes(*_here(dtype))
        return found.estimate(batch, 1, k, n).gain


def _here(dtype: torch.dtype) -> tuple[torch.dtype, int, str]:
    return dtype, torch.get_num_threads(), _C.isa()


@lru_cache
def table(dtype: torch.dtype, threads: int, isa: str) -> CostTable:
    """Reads the table from the cache directory, or measures and keeps it (about two seconds)."""
    return kept("cost", (dtype, threads, isa), _from_json, lambda: measure(dtype))


def _from_json(text: str) -> CostTable:
    raw = json.loads(text)
    float_s, int8_s = (checked_grid(raw[name], AXES) for name in ("float_s", "int8_s"))
    counts = partial(seconds, most=1e9)  # of columns, not of seconds
    columns = nested(raw["columns"], (len(AXES[0]), BLOCK), counts)
    single = ("uneven_s", "symmetric_saving", "pack_s", "again_s", "codes_s")
    passes = ("static_saving", "rotation", "turn")
    others: dict[str, Any] = {name: seconds(raw[name]) for name in single}
    others |= {name: Sweep(*nested(raw[name], (2,), seconds)) for name in passes}
    static_call_s = seconds(raw["static_call_s"], least=-LONGEST)  # one call may be the slower
    return CostTable(float_s, int8_s, columns, static_call_s=static_call_s, **others)


def measure(dtype: torch.dtype) -> CostTable:
    """Times the grid with the operators themselves, float and int8 in turns."""
    with undisturbed():
        grids = measured_grids(AXES, lambda k, n: _column(k, n, dtype))
        saving, static_call_s = quantizing.static_saving(dtype)
        pack_s, again_s, codes_s = _training(dtype)
        return CostTable(
            *grids,
            columns=tuple(_columns(m, dtype) for m in AXES[0]),
            uneven_s=_uneven(dtype),
            symmetric_saving=quantizing.symmetric_saving(dtype),
            static_saving=saving,
            static_call_s=static_call_s,
            pack_s=pack_s,
            again_s=again_s,
            codes_s=codes_s,
            rotation=quantizing.rotation(dtype),
            turn=quantizing.turn(dtype),
        )


def _column(k: int, n: int, dtype: torch.dtype) -> Timing:
    w, op = random(n, k, dtype), ops.int8_linear_dynamic
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


def _training(dtype: torch.dtype, size: int = 512) -> list[float]:
    """Per element: packing a weight, quantizing it for the backward, dequantizing activations."""
    w = random(size, size, dtype)
    q, scale, zero_point = ops.quantize(w, [1], 8, False)
    like = (scale, zero_point, None, None, "none", dtype)
    times = fastest(
        lambda: pack(w, (), Packing(QSpec())),
        lambda: ops.fake_quantize(w, [1], 8, True, dtype),
        lambda: ops.dequantize(q, *like),
    )
    return [seconds / size**2 for seconds in times]
