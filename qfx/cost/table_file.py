"""The files of live tables: JSON with the cells that processes of this machine have measured."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import torch

from qfx.cost import disk
from qfx.cost.grid import Axes, nested, positive, seconds
from qfx.cost.live_table import TRIES, CellTimes, Known, LiveTable, Sizes
from qfx.cost.workloads import KINDS, Workload


@lru_cache
def table(kind: str, dtype: torch.dtype, threads: int, isa: str) -> KeptTable:
    """Returns the table of this kind of work, with the cells that processes of this machine
    measured."""
    return KeptTable(TableFile(kind, (dtype, threads, isa)), dtype)


class KeptTable(LiveTable):
    """A live table that is stored in a file."""

    def __init__(self, file: TableFile, dtype: torch.dtype) -> None:
        super().__init__(KINDS[file.kind], dtype, disk.TABLES.find(file))
        self._file = file

    def keep(self) -> None:
        """Writes newly measured cells to the file."""
        if self.changed:
            self.changed = False
            disk.TABLES.put(self._file, self.known)


class TableFile:
    """The file of one table; `kind` names a row of KINDS, `machine` is (type, threads, ISA)."""

    def __init__(self, kind: str, machine: disk.Machine) -> None:
        self.kind, self._machine = kind, machine

    def key(self) -> str:
        return disk.file_name(self.kind, *self._machine)

    def read(self, data: bytes) -> Known:
        return read_known(KINDS[self.kind], data.decode("utf-8"))

    def make(self) -> Known:
        return Known()

    def written(self, value: Known) -> bytes:
        return text_of(value).encode()


def text_of(known: Known) -> str:
    """Returns the JSON that `read_known` reads."""
    cells = [[*sizes, *cell] for sizes, cell in known.cells.items()]
    return json.dumps({"cells": cells, "numbers": known.numbers})


def read_known(workload: Workload, text: str) -> Known:
    """Reads the JSON of a table. Raises ValueError, KeyError or TypeError if it is not of this
    kind."""
    raw = json.loads(text)
    cells = dict(_cell(workload.axes, row) for row in raw["cells"])
    numbers = {}
    for name, values in dict(raw["numbers"]).items():
        _, size, check = workload.extras[name]
        numbers[name] = nested(values, (size,), check)
    return Known(cells, numbers)


def _cell(axes: Axes, row: Any) -> tuple[Sizes, CellTimes]:
    m, k, n, float_s, int8_s, spread, tries = row
    if any(type(s) is not int or s not in p for s, p in zip((m, k, n), axes, strict=True)):
        raise ValueError(f"the kept table has a cell {(m, k, n)}, which is not on its axes")
    if type(tries) is not int or not 1 <= tries <= TRIES:
        raise ValueError(f"the kept table holds {str(tries)[:40]} where tries belong")
    return (m, k, n), CellTimes(positive(float_s), positive(int8_s), seconds(spread), tries)
