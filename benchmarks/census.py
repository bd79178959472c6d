"""A census: which share of the multiply-accumulates of models of ten fields is in int8?

The multiply-accumulates of a float forward are counted by `benchmarks/macs.py`, without qfx. Those
in int8 are those of the nodes that the plan of `torch.compile(model, backend="qfx")` makes int8,
counted in the same way while the captured graph runs in float. Nothing is compiled. Each model
runs in a process of its own. `python -m benchmarks.results_page` writes docs/census.md.
"""

from __future__ import annotations

import re
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from benchmarks.census_models import FIELDS, build
from benchmarks.fresh import FailedError, call
from benchmarks.macs import (
    ACTIVATIONS,
    RECURRENT,
    MacCounter,
    Macs,
    by_weight,
    counting,
    expanded_attention,
    macs_of,
)
from benchmarks.question import Question, Row, chosen
from qfx.cost.device_models import current_costs
from qfx.dynamo_backend.captured_graphs import watch_compiled
from qfx.host.operators import HigherOrderOperator
from qfx.match.base import FLOAT
from qfx.pipeline import Context, run_passes
from qfx.values.config import Config, parse_options

GAINS: dict[str, Config] = {
    "gain 0": parse_options({"minimum_gain": 0})[0],
    "default": parse_options(None)[0],
}
NOWHERE = "in no captured graph"
TABLE = {name: field for field, models in FIELDS.items() for name in models}


class Captured(fx.Interpreter):
    """Runs a captured graph in float, and adds the multiply-accumulates of each node to those that
    are in int8 by each plan, or to the reasons of the first plan."""

    def __init__(self, gm: fx.GraphModule, plans: Sequence[Any], census: Census) -> None:
        super().__init__(gm)
        self.decided = [{e.match.node: e for e in plan.entries} for plan in plans]
        self.census = census

    def run_node(self, n: fx.Node) -> Any:
        if isinstance(n.target, HigherOrderOperator):
            return super().run_node(n)
        with counting(self.census.counter) as found:
            result = super().run_node(n)
        self.census.seen.update(found)
        if n in self.decided[0] and _is_recurrent(self.decided[0][n]):  # as in the float forward
            found = Counter({RECURRENT: found.total()})
        for int8, entries in zip(self.census.int8, self.decided, strict=True):
            if n in entries and entries[n].token != FLOAT:
                int8.update(found)
        first = self.decided[0].get(n)
        if (count := by_weight(found)) and (first is None or first.token == FLOAT):
            self.census.reasons[_reason(first)] += count
        return result


def _is_recurrent(entry: Any) -> bool:
    """Whether a matmul is one of the two of a recurrent layer or cell."""
    match = getattr(entry.match, "site", entry.match)
    return bool(re.search(r"\bweight_[ih]h", getattr(match, "parameter", "")))


def _reason(entry: Any) -> str:
    if entry is None:
        return "not recognized"
    known = re.sub(r"computed by \w+", "computed", entry.reason)
    return re.sub(r"int8 would be .*", "int8 would be slower", known)


class Census:
    """The counts of one call of a model: `int8` for each of GAINS, and `reasons` of what stays
    float at the first of them."""

    def __init__(self, model: nn.Module) -> None:
        self.counter = MacCounter(model)
        self.int8: list[Macs] = [Counter() for _ in GAINS]
        self.seen: Macs = Counter()
        self.reasons: Macs = Counter()
        self.costs = current_costs()

    def look(self, gm: fx.GraphModule, here: Mapping[str, str], arguments: Sequence[Any]) -> Any:
        """Runs one captured graph; `watch_compiled` calls this in place of the graph."""
        contexts = (Context(config, self.costs, here, around=None) for config in GAINS.values())
        plans = [run_passes(gm, context, "decide").plan for context in contexts]
        return Captured(gm, plans, self).run(*arguments)


def counted(model: nn.Module, inputs: Mapping[str, Any]) -> Row:
    """Returns the multiply-accumulates of one call by kind, those in int8 for each of GAINS, and
    why those with a weight stay float at gain 0."""
    torch.manual_seed(0)
    every = macs_of(model, inputs)
    torch._dynamo.reset()
    census = Census(model)
    torch.manual_seed(0)
    with expanded_attention():
        watch_compiled(model, census.look, **inputs)
    if (outside := by_weight(every) - by_weight(census.seen)) > 0:
        census.reasons[NOWHERE] += outside
    return {
        "macs": dict(every),
        **{name: dict(int8) for name, int8 in zip(GAINS, census.int8, strict=True)},
        "reasons": dict(census.reasons.most_common()),
    }


def one(field: str, name: str) -> Row:
    """Counts one model of the census in this process."""
    return counted(*build(field, name))


def share(row: Row, gain: str) -> float:
    """Returns which part of the products with a weight is in int8, 0 to 1."""
    return by_weight(row[gain]) / by_weight(row["macs"])


def tables(options: Namespace) -> Iterator[list[Row]]:
    for name in chosen(options.only, TABLE):
        start = time.perf_counter()
        row: Row = {"field": TABLE[name], "model": name, "failure": ""}
        try:
            environment = {"OMP_NUM_THREADS": str(options.threads)}
            row |= call(one, TABLE[name], name, environment=environment, limit_s=options.limit)
            row |= {f"share, {gain}": round(share(row, gain), 4) for gain in GAINS}
            row["activations"] = row["macs"].get(ACTIVATIONS, 0)
        except FailedError as why:
            row["failure"] = str(why)
        seconds = round(time.perf_counter() - start)
        yield [row | {"seconds": seconds, "torch": torch.__version__}]


def below(rows: list[Row]) -> list[str]:
    return [f"{row['model']}: {row['failure']}" for row in rows if row["failure"]]


QUESTION = Question(
    "Which share of the multiply-accumulates is int8, in models of ten fields?",
    tables,
    key=("field", "model"),
    options={"only": list(TABLE), "limit": 300.0},
    columns=("field", "model", "share, gain 0", "share, default", "seconds"),
    below=below,
)
