"""Cost of linears that are no single int8 GEMM: weights with groups, and float activations. As
`qfx.cost.machine`, with grids of their own that are measured when one is first asked for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

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
from qfx.cost.tables import kept
from qfx.cost.timing import fastest
from qfx.ops.packing import Packing
from qfx.values.scheme import QSpec, Scheme
from qfx.weights.cache import pack

AXES = ((1, 8, 64, 256), (64, 512, 2048), (32, 256, 2048))  # M, K, N
ops = torch.ops.qfx
# The scheme that is measured for each form: the finest groups, with zero points, take the longest.
STORAGES = {
    "groups": Scheme(x=QSpec(symmetric=False), w=QSpec(bits=4, symmetric=False, group=64)),
    "weight_only": Scheme(x=None),
}


@dataclass(frozen=True)
class StorageTable:
    """Seconds of a bias-free linear on the grid of AXES, in float and in this form."""

    float_s: Grid
    int8_s: Grid

    def estimate(self, m: int, k: int, n: int) -> Estimate:
        """Predicted times. A size below the grid's smallest counts as that one."""
        at = tuple(max(size, points[0]) for size, points in zip((m, k, n), AXES, strict=True))
        return Estimate(*(interpolate(grid, AXES, at) for grid in (self.float_s, self.int8_s)))  # type: ignore[arg-type]


def storage_of(scheme: Scheme) -> str | None:
    """Which of STORAGES a scheme takes; None for a single int8 GEMM."""
    if scheme.x is None:
        return "weight_only"
    return "groups" if scheme.w.grouped else None


@lru_cache
def storage_table(name: str, dtype: torch.dtype, threads: int, isa: str) -> StorageTable:
    """Reads the table from the cache directory, or measures and keeps it (about a second)."""
    return kept(name, (dtype, threads, isa), _from_json, lambda: measure_storage(name, dtype))


def measure_storage(name: str, dtype: torch.dtype) -> StorageTable:
    with undisturbed():
        return StorageTable(
            *measured_grids(AXES, lambda k, n: _column(STORAGES[name], k, n, dtype))
        )


def _from_json(text: str) -> StorageTable:
    raw = json.loads(text)
    return StorageTable(*(checked_grid(raw[name], AXES) for name in ("float_s", "int8_s")))


def _column(scheme: Scheme, k: int, n: int, dtype: torch.dtype) -> Timing:
    w, spec = random(n, k, dtype), scheme.x
    packed = pack(w, (), Packing(scheme.w))
    weight, rest = (packed.blocks, packed.scale), (None, "none", dtype)

    def in_int8(x: Tensor) -> Tensor:
        if spec is None:
            return ops.int8_weight_linear(x, *weight, *rest)  # type: ignore[no-any-return]
        codes = ops.quantize(x, list(spec.axes), spec.bits, spec.symmetric)
        return ops.int8_linear_groups(*codes, *weight, packed.zero_point, *rest)  # type: ignore[no-any-return]

    def timed(m: int) -> list[float]:
        x = random(m, k, dtype)
        return fastest(lambda: F.linear(x, w), lambda: in_int8(x), rounds=ROUNDS)

    return timed
