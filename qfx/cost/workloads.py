"""The kinds of work that are timed, one row of KINDS each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from qfx.cost import batches, linears
from qfx.cost.corrections import CORRECTIONS
from qfx.cost.grid import Axes, positive
from qfx.cost.grid_timing import Column, Extra
from qfx.cost.model import Estimate, Work
from qfx.cost.table import GRIDS, Table, Times
from qfx.values.scheme import QSpec, Scheme


@dataclass(frozen=True)
class Workload:
    """A kind of work. `column`: times it in float and in int8, on the M, K and N of `axes`.
    `predicted`: predicts the time of any work of this kind from its table. `extras`: further
    numbers to measure."""

    axes: Axes
    column: Column
    predicted: Callable[[Times, Work], Estimate]
    extras: Mapping[str, Extra] = field(default_factory=dict)

    def read(self, text: str) -> Table:
        """Reads a cost table (measured times) from JSON. Raises ValueError, KeyError or TypeError
        if the text is not a table of this kind of work."""
        table = Table.of(json.loads(text), {name: e[1:] for name, e in self.extras.items()})
        if {name: g.axes for name, g in table.grids.items()} != dict.fromkeys(GRIDS, self.axes):
            raise ValueError("the kept table is of other sizes")
        return table


FINEST = QSpec(bits=4, symmetric=False, group=linears.GROUP)  # zero points take the longest

PACKED = replace(FINEST, packed=True)


def _linear(scheme: Scheme) -> Workload:
    """Returns the workload for all schemes that run the same operator (`qfx.ops.forms`) as
    `scheme`, which is the one that is timed."""
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
    "attention_steps": _batch(batches.ATTENTION_AXES, batches.attention_step),
    "decodes": _batch(batches.DECODE_AXES, batches.decode),
}
