"""The definition of a table in docs/results.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Section:
    """One table. `benchmark`: a pattern for the end of its files' names. `head`: the heading of the
    first column, filled by `row`. `cells`: the columns of one processor and their text, for a row
    among all rows of its file. `only`: which rows are shown. `order`: a key to sort them by; by
    default the order of the file. `table`: the heading of a separate table for some rows. `below`:
    lines under a table, for the rows of one processor."""

    benchmark: str
    title: str
    text: str
    head: str
    row: Callable[[Row], str]
    cells: Callable[[Row, list[Row]], dict[str, str]]
    only: Callable[[Row], bool] = lambda row: True
    order: Callable[[Row], Any] = lambda row: 0
    table: Callable[[Row], str] = lambda row: ""
    below: Callable[[list[Row]], list[str]] = lambda rows: []


def of(key: str) -> Callable[[Row], str]:
    return lambda row: str(row[key])
