"""The definition of a benchmark: the question that it asks, and how its rows are measured."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """A benchmark. Its command is the name of its module.

    `tables(options)` yields lists of rows; each list is printed and saved when it is complete.
    `key`: a new row replaces the saved one that has the same values of these columns and the same
    number of threads. `options`: names of further options and their defaults. `rounds`: samples of
    each candidate by default. `columns`: those to print, all if empty. `below`: lines to print
    under a table.
    """

    asks: str
    tables: Callable[[Namespace], Iterable[list[Row]]]
    key: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    rounds: int = 15
    columns: tuple[str, ...] = ()
    below: Callable[[list[Row]], Iterable[str]] = lambda rows: ()


def chosen(names: Sequence[str], known: Collection[str]) -> list[str]:
    """Returns `names`. Raises SystemExit if one of them is unknown."""
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"{', '.join(unknown)}: not one of {', '.join(known)}")
    return list(names)
