"""Plan: the decisions on the matmuls of a graph, as a value that prints as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
from tabulate import tabulate

from qfx.cost.model import Estimate
from qfx.io.errors import printable
from qfx.match.base import FLOAT, Kind, Match, of_kind
from qfx.ops.guard_counts import Guard
from qfx.values.scheme import Scheme
from qfx.values.site_recipe import SiteRecipe


@dataclass(frozen=True)
class Entry:
    """The decision on one matmul. `scheme` is None if the matmul stays float; `reason` says why it
    is int8 or float."""

    match: Match
    scheme: Scheme | None
    reason: str
    estimate: Estimate | None = None
    where: sympy.Basic | None = None  # for a symbolic M: the sizes for which int8 gains
    recipe: SiteRecipe | None = None  # calibration's result for the scheme
    decodes: bool = False  # runs in float, but by `attention_decode`
    guard: Guard | None = None  # rows above its limit run in float

    @property
    def token(self) -> str:
        """The format in which the matmul runs: a scheme, because it was decided or because the
        model itself calls an int8 operator; or `float`."""
        return self.match.token if self.scheme is None else str(self.scheme)


@dataclass(frozen=True)
class Plan:
    """The decisions on a graph: one entry for every node that contains a matmul, in graph order."""

    entries: tuple[Entry, ...]

    @property
    def quantized(self) -> int:
        return sum(e.token != FLOAT for e in self.entries)

    @property
    def total(self) -> int:
        return len(self.entries)

    def of(self, kind: type[Kind]) -> list[tuple[Kind, Entry]]:
        """Returns the matches of one class, each with its entry."""
        by_node = {entry.match.node: entry for entry in self.entries}
        return [(m, by_node[m.node]) for m in of_kind((e.match for e in self.entries), kind)]

    def noting(self, notes: Mapping[int, Sequence[str]]) -> Plan:
        """Returns the plan with words appended to the reasons of entries. `notes`: words by the
        index of the entry."""
        entries = list(self.entries)
        for place, words in notes.items():
            reason = "; ".join([entries[place].reason, *words])
            entries[place] = replace(entries[place], reason=reason)
        return Plan(tuple(entries))

    def __str__(self) -> str:
        rows = [
            (printable(m.name), m.node.name, m.shape, e.token, printable(e.reason))
            for m, e in ((e.match, e) for e in self.entries)
        ]
        head = ("module", "node", "MxKxN", "scheme", "reason")
        table = tabulate(rows, head, disable_numparse=True)
        return f"{table}\n{self.quantized} of {self.total} matmuls in int8"
