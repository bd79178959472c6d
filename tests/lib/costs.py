"""Cost models for tests: tables that do not depend on the machine, and fixed prices."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

import qfx
from qfx.cost.gpu import cost_of
from qfx.cost.grid import Axes, Grid
from qfx.cost.linears import AXES, BLOCK
from qfx.cost.live_table import CellTimes, Known
from qfx.cost.machine import MachineCost
from qfx.cost.model import Costs, Estimate, Work
from qfx.cost.table import Table
from qfx.cost.workloads import KINDS

CALL = {"float": 1e-6, "int8": 5e-6}  # seconds


def grid(per_mac: float, call: float, axes: Axes) -> Grid:
    ms, ks, ns = axes
    return Grid(axes, [[[m * k * n * per_mac + call for n in ns] for k in ks] for m in ms])


def table(kind: str, int8_per_mac: float, **numbers: tuple[float, ...]) -> Table:
    """Makes a table in which float takes 1e-10 seconds per multiply-accumulate."""
    per_mac, axes = {"float": 1e-10, "int8": int8_per_mac}, KINDS[kind].axes
    return Table({name: grid(per_mac[name], CALL[name], axes) for name in CALL}, numbers)


FIXED = {kind: table(kind, 0.5e-10) for kind in KINDS}
FIXED["int8"] = table(
    "int8",
    0.4e-10,
    static_call=(0.0,),
    static=(0.0, 0.0),
    training=(6e-10, 4e-10, 5e-10),
    **{f"columns_{m}": (*map(float, range(BLOCK)),) for m in AXES[0]},
    uneven=(0.0,),
    symmetric=(0.0,),
    rotation=(1e-9, 1e-10),
    turn=(2e-9, 3e-10),
    windows=(5e-9, 6e-9, 0.75),
    depthwise=(4e-10, 1e-10, 4e-11, 1.024e-7, 1e-10, 2e-10, 2e-11),
)
for _kind in ("products", "attentions", "attention_steps", "decodes"):
    FIXED[_kind] = table(_kind, 2e-10, call=(*CALL.values(),))


def fixed_tables(**others: Table) -> MachineCost:
    """Returns the fixed cost model, with other tables for some kinds."""
    tables = {**FIXED, **others}
    return MachineCost(lambda kind, *machine: tables[kind])


def known(table: Table) -> Known:
    """Returns the cells and numbers of a live table that is completely known."""
    axes = table.grids["float"].axes
    cells = {}
    for point in itertools.product(*(range(len(points)) for points in axes)):
        m, k, n = (points[i] for points, i in zip(axes, point, strict=True))
        cells[m, k, n] = CellTimes(*(table.grids[name].at(point) for name in ("float", "int8")))
    return Known(cells, dict(table.numbers))


FIXED_COSTS = Costs(fixed_tables(), cost_of)


def exchanged(batches: Table) -> Table:
    """Returns a table of batches in which int8 is as fast as float was."""
    grids = {"float": batches.grids["int8"], "int8": batches.grids["float"]}
    return Table(grids, {"call": batches.numbers["call"][::-1]})


class Free:
    """A base of cost models that lack nothing and in which packing and training take no time;
    subclasses define `estimate`."""

    def lacks(self, kind: str, dtype: torch.dtype, scheme: qfx.Scheme | None) -> str | None:
        return None

    def packing(self, work: Work) -> float:
        return 0.0

    def training(self, work: Work) -> float:
        return 0.0


@dataclass(frozen=True)
class Prices(Free):
    """A cost model with the same seconds for every matmul, whatever its size; `attention_decode`
    never gains."""

    float_s: float
    int8_s: float = 1.0

    def estimate(self, work: Work) -> Estimate:
        return Estimate(0.0 if work.kind == "decodes" else self.float_s, self.int8_s)
