"""Kinds of work that are timed, a row of KINDS each, and the table of each on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import torch

from qfx.cost import batches, linears
from qfx.cost.corrections import CORRECTIONS
from qfx.cost.disk import read_or_measure
from qfx.cost.grid import Axes, positive
from qfx.cost.grid_timing import Column, Extra, measured_grids, undisturbed
from qfx.cost.model import Estimate, Work
from qfx.cost.table import Table
from qfx.values.scheme import QSpec, Scheme


@dataclass(frozen=True)
class Workload:
    """What is timed, in float and in int8, on the M, K and N of `axes`, and how the times of a work
    follow from its table."""

    axes: Axes
    column: Column
    predicted: Callable[[Table, Work], Estimate]
    extras: Mapping[str, Extra] = field(default_factory=dict)

    def measure(self, dtype: torch.dtype) -> Table:
        """Times the operators themselves, float and int8 in turns."""
        with undisturbed():
            float_s, int8_s, spread = measured_grids(self.axes, self.column, dtype)
            numbers = {name: tuple(extra.measured(dtype)) for name, extra in self.extras.items()}
        return Table({"float": float_s, "int8": int8_s}, numbers, spread)

    def read(self, text: str) -> Table:
        """ValueError, KeyError or TypeError for what is no table of this kind."""
        table = Table.of(json.loads(text), {name: e[1:] for name, e in self.extras.items()})
        if {name: g.axes for name, g in table.grids.items()} != dict.fromkeys(GRIDS, self.axes):
            raise ValueError("the kept table is of other sizes")
        return table


GRIDS = ("float", "int8")
FINEST = QSpec(bits=4, symmetric=False, group=linears.GROUP)  # zero points take the longest

PACKED = replace(FINEST, packed=True)


def _linear(scheme: Scheme) -> Workload:
    """Of a form of `qfx.ops.forms`: that of this scheme, which is timed for all that have it."""
    return Workload(linears.SPARSE_AXES, partial(linears.column, scheme), linears.between_points)


def _batch(axes: Axes, cell: batches.Cell) -> Workload:
    little = Extra(partial(cell, 1, 1, 8, 8), 2, positive)
    column = lambda k, n, dtype: lambda m: cell(batches.BATCH, m, k, n, dtype)  # noqa: E731
    return Workload(axes, column, batches.per_matrix, {"call": little})


KINDS = {
    "int8": Workload(
        linears.AXES,
        partial(linears.column, Scheme(linears.ASYMMETRIC)),
        linears.with_corrections,
        CORRECTIONS,
    ),
    "groups": _linear(Scheme(linears.ASYMMETRIC, FINEST)),
    "x_groups": _linear(Scheme(replace(linears.ASYMMETRIC, group=FINEST.group), FINEST)),
    "packed": _linear(Scheme(w=PACKED)),
    "x_packed": _linear(Scheme(QSpec(group=PACKED.group), PACKED)),
    "packed_weight_only": _linear(Scheme(x=None, w=PACKED)),
    "weight_only": _linear(Scheme(x=None)),
    "products": _batch(batches.PRODUCT_AXES, batches.product),
    "attentions": _batch(batches.ATTENTION_AXES, batches.attention),
    "decodes": _batch(batches.DECODE_AXES, batches.decode),
}


@lru_cache
def table(kind: str, dtype: torch.dtype, threads: int, isa: str) -> Table:
    """Reads the table from the cache directory, or measures and keeps it (a second or two)."""
    row = KINDS[kind]
    return read_or_measure(kind, (dtype, threads, isa), row.read, lambda: row.measure(dtype))
