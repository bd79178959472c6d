"""The cost model of a CPU: what its tables of each kind predict, and what comes beside."""

from __future__ import annotations

from collections.abc import Callable

import torch

import qfx._C as _C
from qfx.cost.linears import in_float
from qfx.cost.model import Estimate, Work
from qfx.cost.table import Table
from qfx.cost.workloads import KINDS, table
from qfx.values.scheme import Scheme

Tables = Callable[[str, torch.dtype, int, str], Table]  # of kind, type, threads, instruction set


class MachineCost:
    """The cost model of a machine, this one by default, with the threads and the instruction set in
    use. Tables are read from the cache directory, or measured and kept, when first asked for."""

    def __init__(self, tables: Tables = table) -> None:
        self.tables = tables

    def lacks(self, kind: str, dtype: torch.dtype, scheme: Scheme | None) -> str | None:
        """None: what was not measured yet will be."""
        return None

    def estimate(self, work: Work) -> Estimate:
        """A rotation, and outliers, cost as much beside every kind of linear."""
        found = KINDS[work.kind].predicted(self._table(work, work.kind), work)
        int8_s = found.int8_s
        if work.rotated:
            turned = "rotation" if work.x else "turn"  # float activations have no other pass
            int8_s += self._table(work).over(turned, work.m, work.k)
        if work.outliers:
            int8_s += in_float(self._table(work), work.m, work.outliers, work.n)
        return Estimate(found.float_s, int8_s)

    def packing(self, work: Work) -> float:
        """Seconds to quantize and pack the weight."""
        table = self._table(work)
        turned = table.over("rotation", work.n, work.k) if work.rotated else 0.0
        return work.n * work.k * table.numbers["training"][0] + turned

    def training(self, work: Work) -> float:
        """Where K is rotated, so are the weight, in both directions, and both gradients back."""
        table, m, k, n = self._table(work), work.m, work.k, work.n
        _, again_s, codes_s = table.numbers["training"]
        seconds = self.packing(work) + n * k * again_s + m * k * codes_s
        turned = 2 * table.over("turn", n, k) + table.over("turn", m, k)
        return seconds + turned * work.rotated

    def _table(self, work: Work, kind: str = "int8") -> Table:
        return self.tables(kind, work.dtype, torch.get_num_threads(), _C.isa())
