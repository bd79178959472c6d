"""The cost model of a CPU: combines the predictions of its tables with the costs of rotation,
outliers, packing and training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

import torch

import qfx._C as _C
from qfx.cost.default_tables import default_table, family_of
from qfx.cost.linears import in_float
from qfx.cost.live_table import Unmeasured
from qfx.cost.model import Estimate, Work
from qfx.cost.spending import unlimited
from qfx.cost.table import Table, Times
from qfx.cost.table_file import KeptTable, table
from qfx.cost.workloads import KINDS
from qfx.values.scheme import Scheme

T = TypeVar("T")
Tables = Callable[[str, torch.dtype, int, str], Times]  # of kind, type, threads, instruction set
Defaults = Callable[[str, torch.dtype, str], Table | None]  # of kind, type, instruction set
Find = Callable[[str], Times]  # the table of a kind


class MachineCost:
    """The cost model of a CPU, by default this machine's, with the threads and the instruction set
    in use. Cells of its tables are read from the cache directory, or measured and stored, when
    first requested. `defaults` provides the tables to use if there is no time left to measure."""

    def __init__(self, tables: Tables | None = None, defaults: Defaults = default_table) -> None:
        self.tables, self.defaults = tables or table, defaults

    def lacks(self, kind: str, dtype: torch.dtype, scheme: Scheme | None) -> str | None:
        """Returns None, because missing times are measured."""
        return None

    def estimate(self, work: Work) -> Estimate:
        """Returns the predicted seconds, including those of rotation and outliers, which are the
        same for every kind of linear."""
        return self._predicted(work, lambda find: _estimated(find, work))

    def packing(self, work: Work) -> float:
        """Returns the seconds to quantize and pack the weight."""
        return self._predicted(work, lambda find: _packing(find("int8"), work))

    def training(self, work: Work) -> float:
        """Returns the seconds that training adds: packing and quantizing the weight again and, if K
        is rotated, rotating both gradients back."""
        return self._predicted(work, lambda find: _training(find("int8"), work))

    def _predicted(self, work: Work, predict: Callable[[Find], T]) -> T:
        threads, isa = torch.get_num_threads(), _C.isa()
        used: list[Times] = []

        def measured(kind: str) -> Times:
            used.append(self.tables(kind, work.dtype, threads, isa))
            return used[-1]

        def default(kind: str) -> Times:
            found = self.defaults(kind, work.dtype, isa)
            if found is None:
                raise Unmeasured
            return found

        try:
            return predict(measured)
        except Unmeasured:
            pass
        finally:
            _keep(used)
        try:
            found = predict(default)
        except Unmeasured:  # a family without defaults is measured, however long it takes
            with unlimited():
                measured_now = predict(measured)
            _keep(used)
            return measured_now
        if isinstance(found, Estimate):
            return replace(found, source=f"by defaults of {family_of(isa)}, not measured here")
        return found


def _keep(tables: Iterable[Times]) -> None:
    """Writes to disk the cells of these tables that were measured."""
    for each in tables:
        if isinstance(each, KeptTable):
            each.keep()


def _estimated(find: Find, work: Work) -> Estimate:
    if work.quads:
        return _depthwise(find("int8"), work)
    found = KINDS[work.kind].predicted(find(work.kind), work)
    float_s, int8_s = found.float_s, found.int8_s
    if work.pixels:
        pixel_s, element_s, share = find("int8").numbers["windows"]
        more = work.k * element_s if work.gathered else work.pixels * pixel_s
        float_s, int8_s = float_s * share, max(int8_s + work.m * more, int8_s / 2)
    elif work.rotated:
        turned = "rotation" if work.x else "turn"  # float activations have no other pass
        int8_s += find("int8").over(turned, work.m, work.k)
    if work.outliers:
        int8_s += in_float(find("int8"), work.m, work.outliers, work.n)
    return Estimate(float_s, int8_s)


def _depthwise(table: Times, work: Work) -> Estimate:
    """Predicts the seconds of a depthwise convolution with m outputs of each of n channels."""
    numbers = table.numbers["depthwise"]

    def seconds(taps: int, input_s: float, output_s: float, tap_s: float) -> float:
        return work.n * (work.pixels * input_s + work.m * (output_s + taps * tap_s))

    float_s = numbers[3] + seconds(work.k, *numbers[4:])
    return Estimate(float_s, seconds(work.quads, *numbers[:3]))


def _packing(table: Times, work: Work) -> float:
    turned = table.over("rotation", work.n, work.k) if work.rotated else 0.0
    return work.n * work.k * table.numbers["training"][0] + turned


def _training(table: Times, work: Work) -> float:
    m, k, n = work.m, work.k, work.n
    _, again_s, codes_s = table.numbers["training"]
    seconds = _packing(table, work) + n * k * again_s + m * k * codes_s
    turned = 2 * table.over("turn", n, k) + table.over("turn", m, k)
    return seconds + turned * work.rotated
