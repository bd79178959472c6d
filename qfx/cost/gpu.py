"""Cost on a GPU: a table per GPU, committed as qfx/cost/<name>.json by `python -m benchmarks.gpu`.

A table holds grids of seconds of the GPU's own work, without the host's launches: of products, of
whole matrices in int8 and in float; and of passes, which make codes of activations. Between the
points the logarithm of the time for each unit of work is linear in those of the sizes, and beyond
the last point it stays as it is. A linear in int8 is its product and its pass, as if nobody shared
the pass and no norm before it were fused with it: sites are rather refused than slowed down.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch

from qfx.cost.interpolation import between_logs
from qfx.cost.model import Estimate
from qfx.cost.tables import nested, positive, seconds
from qfx.values.gpu_build import name_of
from qfx.values.scheme import PER_TENSOR, Scheme

SCHEMA = 1
HERE = Path(__file__).parent
PRODUCTS = ("float", "int8", "groups", "weight_only")  # axes M, K, N
BATCHED = ("float_batched", "int8_batched")  # M, K, N of each of `batch` matrices
PASSES = ("quantize", "tensor", "static", "rotated", "rotate")  # axes M, K


@dataclass(frozen=True)
class GpuGrid:
    """Seconds by sizes: nested lists, as deep as there are axes, each of at least two points."""

    axes: tuple[tuple[int, ...], ...]
    seconds: Any

    def at(self, *sizes: int) -> float:
        """Seconds for these sizes; never less than the least of all points."""
        wanted = [max(size, 1) for size in sizes]
        per_unit = _log_per_unit(self.seconds, self.axes, wanted)
        return max(math.exp(per_unit) * math.prod(wanted), _least(self.seconds))


def _log_per_unit(seconds: Any, axes: Sequence[Sequence[int]], at: Sequence[int]) -> float:
    if not axes:
        return math.log(seconds)
    (points, *inner), (size, *others) = axes, at
    i, t = between_logs(points, size)
    low, high = (_log_per_unit(seconds[j], inner, others) - math.log(points[j]) for j in (i, i + 1))
    return (1 - t) * low + t * high


def _least(seconds: Any) -> float:
    return min(map(_least, seconds)) if isinstance(seconds, list) else float(seconds)


@dataclass(frozen=True)
class GpuTable:
    """What was measured on the GPU `name`: grids by (dtype, product or pass)."""

    name: str
    grids: Mapping[tuple[str, str], GpuGrid]
    batch: int
    training: Mapping[str, tuple[float, float]]  # as in CostTable: weight_s and codes_s

    @classmethod
    def read(cls, text: str) -> GpuTable:
        """From JSON. ValueError for another schema, a grid of another shape, what is no time."""
        raw = json.loads(text)
        if raw.get("schema") != SCHEMA:
            raise ValueError(f"a GPU table of schema {raw.get('schema')}, expected {SCHEMA}")
        named = (("mkn", PRODUCTS), ("batched", BATCHED), ("mk", PASSES))
        axes = {what: _axes(name, raw["axes"][name]) for name, each in named for what in each}
        grids = {
            (dtype, what): _checked(what, axes[what], times)
            for dtype, found in raw["seconds"].items()
            for what, times in found.items()
        }
        training = {d: cast(Any, nested(s, (2,), seconds)) for d, s in raw["training"].items()}
        if type(raw["batch"]) is not int or raw["batch"] < 1:
            raise ValueError(f"a GPU table of batches of {raw['batch']!r}")
        return cls(raw["gpu"], grids, raw["batch"], training)


def _axes(name: str, raw: Any) -> tuple[tuple[int, ...], ...]:
    """Points of each axis, ascending sizes."""
    for points in raw:
        if any(type(p) is not int or p < 1 for p in points) or points != sorted(set(points)):
            raise ValueError(f"the axis {points!r} of {name} is no list of ascending sizes")
    return tuple(map(tuple, raw))


def _checked(what: str, axes: tuple[tuple[int, ...], ...], raw: Any) -> GpuGrid:
    try:
        nested(raw, tuple(map(len, axes)), positive)
    except ValueError as why:
        raise ValueError(f"the grid {what}: {why}") from None
    return GpuGrid(axes, raw)


@dataclass(frozen=True)
class GpuCost:
    """The cost model of one GPU. A `CostModel` for the sites that `lacks` finds nothing for."""

    table: GpuTable

    def lacks(self, dtype: torch.dtype, scheme: Scheme | None) -> str | None:
        """Why a site's times cannot be predicted, or None. `scheme` None: a batch of products."""
        wanted: tuple[str, ...] = BATCHED
        if scheme is not None:
            product, made = parts(scheme)
            wanted = ("float", product, *([made] if made else []))
        missing = [w for w in wanted if (_short(dtype), w) not in self.table.grids]
        if not missing:
            return None
        return f"the table of {self.table.name} has no times of {missing[0]} in {_short(dtype)}"

    def estimate(
        self, m: int, k: int, n: int, dtype: torch.dtype, scheme: Scheme, outliers: int = 0
    ) -> Estimate:
        product, made = parts(scheme)
        int8_s = self._grid(dtype, product).at(m, k, n)
        if made:
            int8_s += self._grid(dtype, made).at(m, k)
        in_float = self._grid(dtype, "float")
        if outliers:
            int8_s += in_float.at(m, outliers, n)
        return Estimate(in_float.at(m, k, n), int8_s)

    def estimate_bmm(self, batch: int, m: int, k: int, n: int, dtype: torch.dtype) -> Estimate:
        share = batch / self.table.batch
        float_s, int8_s = (share * self._grid(dtype, what).at(m, k, n) for what in BATCHED)
        return Estimate(float_s, int8_s)

    def estimate_attention(
        self, batch: int, m: int, k: int, n: int, dtype: torch.dtype
    ) -> Estimate:
        raise AssertionError("no attention on a GPU is matched")

    def estimate_decode(self, batch: int, k: int, n: int, dtype: torch.dtype) -> float:
        raise AssertionError("no attention on a GPU is matched")

    def packing(self, k: int, n: int, dtype: torch.dtype, scheme: Scheme) -> float:
        """Seconds to quantize and pack a weight [n, k]; at most, as those of the backward count."""
        seconds = n * k * self.table.training[_short(dtype)][0]
        return seconds + (self._grid(dtype, "rotate").at(n, k) if scheme.block(k) else 0.0)

    def training(self, m: int, k: int, n: int, dtype: torch.dtype, scheme: Scheme) -> float:
        """Seconds that training adds to a step's int8 forward."""
        weight_s, codes_s = self.table.training[_short(dtype)]
        seconds = n * k * weight_s + m * k * codes_s
        if scheme.block(k):  # the weight in both directions and its gradient back, that of x back
            turn = self._grid(dtype, "rotate")
            seconds += 3 * turn.at(n, k) + turn.at(m, k)
        return seconds

    def _grid(self, dtype: torch.dtype, what: str) -> GpuGrid:
        return self.table.grids[_short(dtype), what]


def parts(scheme: Scheme) -> tuple[str, str | None]:
    """The product and the pass that a scheme is made of; the scheme is that of its K (`at`)."""
    if scheme.x is None:
        return "weight_only", "rotate" if scheme.rotation else None
    product = "groups" if scheme.w.grouped else "int8"
    if scheme.rotation:
        return product, "rotated"
    if scheme.x.static:
        return product, "static"
    return product, "tensor" if scheme.x.axes == PER_TENSOR else "quantize"


def cost_of(device: torch.device, dtype: torch.dtype, scheme: Scheme | None) -> GpuCost | str:
    """The model for sites of this type and scheme on a GPU, or why there is none."""
    name = name_of(device)
    table = table_of(name)
    if table is None:
        return f"no measured table for {name}"
    model = GpuCost(table)
    return model.lacks(dtype, scheme) or model


@lru_cache
def table_of(name: str, folder: Path = HERE) -> GpuTable | None:
    """The committed table of the GPU of this name, or None."""
    path = folder / f"{slug(name)}.json"
    return GpuTable.read(path.read_text()) if path.exists() else None


def slug(name: str) -> str:
    """A GPU's name as a file name: "NVIDIA H200" is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
