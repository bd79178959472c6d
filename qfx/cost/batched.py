"""Cost of batches: products of two activations, and attentions. With grids of their own, that are
measured when one is first asked for."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from qfx.cost.interpolation import (
    ROUNDS,
    Axes,
    Grid,
    checked_grid,
    interpolate_logs,
    measured_grids,
    random,
    undisturbed,
)
from qfx.cost.model import Estimate
from qfx.cost.tables import kept, positive
from qfx.cost.timing import fastest

BMM_AXES = ((1, 8, 64, 256), (32, 64, 128, 512), (32, 64, 128, 512))  # M, K, N of each matrix
ATTENTION_AXES = ((1, 16, 128, 512), (32, 64, 128), (16, 128, 512))  # M, D, N
DECODE_AXES = (
    (1, 2),
    (32, 64, 128),
    (16, 128, 512),
)  # M, D, N; no more than one query is asked for
FAR = 64 << 20  # bytes that no cache near the processor holds
BATCH = 8  # matrices of a measurement
Cell = Callable[[int, int, int, int, torch.dtype], list[float]]


@dataclass(frozen=True)
class BatchTable:
    """Seconds of BATCH products, or attentions, on the grid of `axes`, and of a call with
    little to do."""

    axes: Axes
    float_s: Grid
    int8_s: Grid
    float_call_s: float
    int8_call_s: float

    def estimate(self, batch: int, m: int, k: int, n: int) -> Estimate:
        """Predicted times. A size below the grid's smallest counts as that one: vectors are not
        shorter."""
        m, k, n = (max(size, points[0]) for size, points in zip((m, k, n), self.axes, strict=True))

        def seconds(grid: Grid, call: float) -> float:
            matrices = max(interpolate_logs(grid, self.axes, (m, k, n)) - call, 0.0)
            return call + matrices * batch / BATCH

        return Estimate(
            seconds(self.float_s, self.float_call_s), seconds(self.int8_s, self.int8_call_s)
        )


@lru_cache
def bmm_table(dtype: torch.dtype, threads: int, isa: str) -> BatchTable:
    """Reads the table from the cache directory, or measures and keeps it (about a second)."""
    read = partial(_from_json, axes=BMM_AXES)
    return kept("bmm", (dtype, threads, isa), read, lambda: measure_bmm(dtype))


@lru_cache
def attention_table(dtype: torch.dtype, threads: int, isa: str) -> BatchTable:
    """The same for scaled_dot_product_attention."""
    read = partial(_from_json, axes=ATTENTION_AXES)
    return kept("attention", (dtype, threads, isa), read, lambda: measure_attention(dtype))


@lru_cache
def decode_table(dtype: torch.dtype, threads: int, isa: str) -> BatchTable:
    """The same for one query, with `attention_decode` in the place of int8."""
    read = partial(_from_json, axes=DECODE_AXES)
    return kept("decode", (dtype, threads, isa), read, lambda: measure_decode(dtype))


def measure_bmm(dtype: torch.dtype) -> BatchTable:
    return _measure(BMM_AXES, _bmm_cell, dtype)


def measure_attention(dtype: torch.dtype) -> BatchTable:
    return _measure(ATTENTION_AXES, _attention_cell, dtype)


def measure_decode(dtype: torch.dtype) -> BatchTable:
    return _measure(DECODE_AXES, _decode_cell, dtype)


def _from_json(text: str, axes: Axes) -> BatchTable:
    raw = json.loads(text)
    if raw["axes"] != [list(points) for points in axes]:
        raise ValueError("the kept table is of other sizes")
    float_s, int8_s = (checked_grid(raw[name], axes) for name in ("float_s", "int8_s"))
    calls = (positive(raw[name]) for name in ("float_call_s", "int8_call_s"))
    return BatchTable(axes, float_s, int8_s, *calls)


def _measure(axes: Axes, cell: Cell, dtype: torch.dtype) -> BatchTable:
    with undisturbed():
        grids = measured_grids(axes, lambda k, n: lambda m: cell(BATCH, m, k, n, dtype))
        calls = cell(1, 1, 8, 8, dtype)
    return BatchTable(axes, *grids, *calls)


def _bmm_cell(batch: int, m: int, k: int, n: int, dtype: torch.dtype) -> list[float]:
    """As in attention, b is contiguous along its features, the shorter of K and N."""
    a = random(batch * m, k, dtype).reshape(batch, m, k)
    b = random(batch * n, k, dtype).reshape(batch, n, k)
    b = b if k <= n else b.mT.contiguous().mT
    return fastest(
        lambda: torch.matmul(a, b.mT),
        lambda: torch.ops.qfx.int8_bmm_dynamic(a, b, [1], 8, False, 8, dtype),
        rounds=ROUNDS,
    )


def _attention_cell(batch: int, m: int, k: int, n: int, dtype: torch.dtype) -> list[float]:
    q, keys, values = _heads(batch, m, k, n, dtype)
    return fastest(
        lambda: F.scaled_dot_product_attention(q, keys, values),
        lambda: torch.ops.qfx.int8_attention(q, keys, values, None, k**-0.5, False, dtype),
        rounds=ROUNDS,
    )


def _decode_cell(batch: int, m: int, k: int, n: int, dtype: torch.dtype) -> list[float]:
    """Keys and values from memory: since the last token the whole model was read."""
    q, keys, values = _heads(batch, m, k, n, dtype)
    pairs = FAR // max(2 * keys.numel() * keys.element_size(), FAR // 1024)
    apart = torch.contiguous_format  # as cat leaves a cache
    past = itertools.cycle(
        [(keys.clone(memory_format=apart), values.clone(memory_format=apart)) for _ in range(pairs)]
    )
    return fastest(
        lambda: F.scaled_dot_product_attention(q, *next(past)),
        lambda: torch.ops.qfx.attention_decode(q, *next(past), None, k**-0.5, False, dtype),
        rounds=ROUNDS,
    )


def _heads(batch: int, m: int, k: int, n: int, dtype: torch.dtype) -> list[Tensor]:
    """q, keys, values as models call it: heads are split off the features, so rows lie apart."""
    return [
        random(rows, batch * k, dtype).reshape(1, rows, batch, k).transpose(1, 2)
        for rows in (m, n, n)
    ]
