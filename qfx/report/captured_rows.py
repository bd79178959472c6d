"""Captured rows: runs each matmul of a model's captured graphs in float and, if it becomes int8,
also in int8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from qfx.cost.model import Costs
from qfx.graph.capture import parameter_name
from qfx.match.attention import Attention
from qfx.match.base import FLOAT
from qfx.match.operator_calls import OwnCall
from qfx.pipeline import Context, run_passes
from qfx.plan.plan import Entry, Plan
from qfx.report.report_row import Row
from qfx.report.side_by_side import SideBySide
from qfx.values.config import Config


@dataclass(frozen=True)
class AsCalled:
    """A quantized model that runs as it is, without a backend that rewrites it: its int8 modules
    compute in int8, and all else in float. `reasons`: why its float linears are float, by name.
    `programs`: whether `compile_for_generate` made programs of it."""

    reasons: Mapping[str, str]
    programs: bool

    def plan(self, decided: Plan) -> Plan:
        """Returns the plan of what runs when the model is called as it is. `decided`: the plan that
        the backend would follow."""
        return Plan(tuple(map(self._entry, decided.entries)))

    def _entry(self, entry: Entry) -> Entry:
        if isinstance(entry.match, OwnCall):
            return entry
        return replace(entry, scheme=None, reason=self._why(entry))

    def _why(self, entry: Entry) -> str:
        if found := self.reasons.get(entry.match.path):
            return found
        if self.programs and isinstance(entry.match, Attention):
            return "float in the modules; programs attend over int8 keys and values"
        would = entry.token if entry.scheme else "float"
        return f"float as called; compiled by qfx: {would}, {entry.reason}"


@dataclass(frozen=True)
class CapturedGraphs:
    """The graphs of one call of a model, with their measurements. `config` and `costs`, or
    `as_called` if it is not None, decide which matmuls are int8."""

    config: Config
    costs: Costs
    as_called: AsCalled | None
    graphs: list[SideBySide] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)  # names of modules and parameters
    int8: set[str] = field(default_factory=set)  # of parameters

    def look(self, gm: fx.GraphModule, here: Mapping[str, str], arguments: Sequence[Any]) -> Any:
        """Runs one captured graph, measures its matmuls, and returns its output; `watch_compiled`
        calls this in place of the graph. `here`: prefixes that complete the names in the graph to
        names in the model."""
        work = run_passes(gm, Context(self.config, self.costs, here, around=None), "decide")
        plan = self.as_called.plan(work.plan) if self.as_called else work.plan
        gradients = self.config.chosen.backward == "int8"
        matches, observer = work.matches, SideBySide(gm, plan, gradients)
        self.graphs.append(observer)
        int8 = [root for e in plan.entries if e.scheme for root in e.match.weights]
        self.int8.update(parameter_name(w, here) for w in int8)
        weights = [root for m in matches for root in m.weights]
        self.seen.update(parameter_name(w, here) for w in weights)
        self.seen.update(name for m in matches for name in (m.path, m.name))
        return observer.run(*arguments)

    @property
    def rows(self) -> list[Row]:
        """The rows of the report for the matmuls of all graphs, in order."""
        return [row for graph in self.graphs for row in graph.rows()]

    @property
    def own_operators(self) -> bool:
        """Whether a graph calls int8 operators already before qfx rewrites it."""
        entries = (entry for graph in self.graphs for entry in graph.entries)
        return any(isinstance(e.match, OwnCall) and e.token != FLOAT for e in entries)

    @property
    def macs(self) -> tuple[int, int, int]:
        """Three numbers, as in `Report.macs`: the multiply-accumulates of the int8 matmuls, those
        of all matmuls, and the number of matmuls that are not counted."""
        counts = [graph.multiplied() for graph in self.graphs]
        int8, every, unknown = (sum(count[i] for count in counts) for i in range(3))
        return int8, every, unknown
