"""Cost model of a GPU: tables committed as qfx/cost/<name>.json by `python -m benchmarks.gpu`.

A table, one for each dtype, holds seconds of the GPU's own work, without launches by the host: of
matmuls in int8 and in float, and of passes, which quantize activations.

The prediction of an int8 linear is the sum of its matmul and its pass, as if no other linear shared
the pass and no preceding norm were fused with it. The estimate is thus pessimistic: qfx leaves a
linear in float rather than make it slower.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from qfx.cost.grid import count, seconds
from qfx.cost.model import Estimate, Work
from qfx.cost.table import Table
from qfx.host.gpu_build import name_of
from qfx.values.scheme import PER_TENSOR, Scheme

SCHEMA = 2
HERE = Path(__file__).parent
PRODUCTS = ("float", "int8", "groups", "weight_only")  # axes M, K, N; by kind of work
BATCHED = ("float_products", "products")  # M, K, N of each of `batch` matrices
PASSES = ("quantize", "tensor", "static", "rotated", "rotate")  # axes M, K
# Seconds per element that training adds, of the weight and of codes in the backward.
NUMBERS = {"training": (2, seconds), "batch": (1, count)}


@dataclass(frozen=True)
class GpuCost:
    """The cost model of the GPU `name`, from its tables by dtype."""

    name: str
    tables: Mapping[str, Table]

    @classmethod
    def read(cls, text: str) -> GpuCost:
        """Reads the JSON of the tables. Raises ValueError for another schema, a grid of another
        shape, and values that are not times."""
        raw = json.loads(text)
        if raw.get("schema") != SCHEMA:
            raise ValueError(f"a GPU table of schema {raw.get('schema')}, expected {SCHEMA}")
        tables = {dtype: Table.of(each, NUMBERS) for dtype, each in raw["tables"].items()}
        for name, grid in (pair for table in tables.values() for pair in table.grids.items()):
            if len(grid.axes) != (2 if name in PASSES else 3):
                raise ValueError(f"the grid {name} has {len(grid.axes)} axes")
        return cls(raw["gpu"], tables)

    def lacks(self, kind: str, dtype: torch.dtype, scheme: Scheme | None) -> str | None:
        found, wanted = self.tables.get(_short(dtype)), [kind, in_float(kind)]
        if scheme is not None:
            wanted += [*passes_of(scheme), *(["rotate"] if scheme.rotation else [])]
        missing = [name for name in wanted if found is None or name not in found.grids]
        if not missing:
            return None
        return f"the table of {self.name} has no times of {missing[0]} in {_short(dtype)}"

    def estimate(self, work: Work) -> Estimate:
        table, m, k, n = self._table(work), work.m, work.k, work.n
        in_int8, as_float = table.grids[work.kind], table.grids[in_float(work.kind)]
        if work.scheme is None:
            share = work.batch / table.numbers["batch"][0]
            return Estimate(share * as_float.logs(m, k, n), share * in_int8.logs(m, k, n))
        passes = sum(table.grids[name].logs(m, k) for name in passes_of(work.scheme))
        beside = as_float.logs(m, work.outliers, n) if work.outliers else 0.0
        return Estimate(as_float.logs(m, k, n), in_int8.logs(m, k, n) + passes + beside)

    def packing(self, work: Work) -> float:
        """Returns an upper bound on the seconds to quantize and pack the weight: the measured time
        includes what the backward needs."""
        weight_s, _ = self._table(work).numbers["training"]
        return work.n * work.k * weight_s + self._turned(work, work.n)

    def training(self, work: Work) -> float:
        """Returns the seconds that training adds. With rotation, the weight is rotated in both
        directions, its gradient back, and the gradient of x back."""
        weight_s, codes_s = self._table(work).numbers["training"]
        seconds = work.n * work.k * weight_s + work.m * work.k * codes_s
        return seconds + 3 * self._turned(work, work.n) + self._turned(work, work.m)

    def _table(self, work: Work) -> Table:
        return self.tables[_short(work.dtype)]

    def _turned(self, work: Work, rows: int) -> float:
        return self._table(work).grids["rotate"].logs(rows, work.k) if work.rotated else 0.0


def in_float(kind: str) -> str:
    """Returns the name of the grid with the float times of a kind of work. Its int8 times are in
    the grid that has the name of the kind."""
    return "float" if kind in PRODUCTS else f"float_{kind}"


def passes_of(scheme: Scheme) -> tuple[str, ...]:
    """Returns the names of the passes over activations that a linear of this scheme runs before its
    matmul. `scheme` must be the one for its K (`Scheme.at`)."""
    if scheme.x is None:
        return ("rotate",) if scheme.rotation else ()
    if scheme.rotation:
        return ("rotated",)
    if scheme.x.static:
        return ("static",)
    return ("tensor",) if scheme.x.axes == PER_TENSOR else ("quantize",)


def cost_of(device: torch.device) -> GpuCost | str:
    """Returns the cost model of a GPU, or the reason why there is none."""
    name = name_of(device)
    return model_of(name) or f"no measured table for {name}"


@lru_cache
def model_of(name: str, folder: Path = HERE) -> GpuCost | None:
    """Returns the committed cost model of the GPU `name`, or None."""
    path = folder / f"{slug(name)}.json"
    return GpuCost.read(path.read_text()) if path.exists() else None


def slug(name: str) -> str:
    """Returns a GPU's name as a file name: "NVIDIA H200" becomes nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
