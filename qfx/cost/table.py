"""Table: measured times, as grids and numbers by name; read and written as JSON.

One table holds a kind of work on this machine, or all work of one dtype on a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from qfx.cost.grid import Check, Grid, Interpolated, nested, seconds

NEAR = 0.25  # the largest difference, as a fraction, of two times of a settled cell
GRIDS = ("float", "int8")


class Times:
    """Grids of seconds and other numbers, by name. A subclass has them all, or measures them when
    they are read."""

    grids: Mapping[str, Interpolated]
    numbers: Mapping[str, tuple[float, ...]]

    def over(self, name: str, m: int, k: int) -> float:
        """Returns the seconds of a pass over m rows of k elements. `name`: the pair of numbers with
        the seconds of a row and of an element."""
        row_s, element_s = self.numbers[name]
        return m * (row_s + k * element_s)


@dataclass(frozen=True)
class Table(Times):
    """Measured grids of seconds, and numbers beside them. Each cell was timed twice. `spread`: the
    fraction by which the longer time exceeded the shorter one, as a quantile over the cells."""

    grids: Mapping[str, Grid]
    numbers: Mapping[str, tuple[float, ...]]
    spread: float = 0.0

    @property
    def settled(self) -> bool:
        return self.spread <= NEAR

    @classmethod
    def of(cls, raw: Any, numbers: Mapping[str, tuple[int, Check]]) -> Table:
        """Reads a table from parsed JSON. `numbers`: how many numbers there are of each name, and
        their check. Raises ValueError, KeyError or TypeError if `raw` is not a table."""
        grids = {name: _grid(name, **grid) for name, grid in dict(raw["grids"]).items()}
        checked = {
            name: nested(raw["numbers"][name], (count,), check)
            for name, (count, check) in numbers.items()
        }
        return cls(grids, checked, seconds(raw.get("spread", 0.0)))

    def text(self) -> str:
        """Returns the JSON that `of` reads."""
        return json.dumps(asdict(self))


def _grid(name: str, axes: Any, seconds: Any) -> Grid:
    try:
        return Grid(axes, seconds)
    except ValueError as why:
        raise ValueError(f"the grid {name}: {why}") from None
