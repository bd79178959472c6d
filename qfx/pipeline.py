"""The pipeline: the list of passes in the order in which they run, and a context with the arguments
that differ from one use of the list to another.

`torch.compile`, `qfx.rewrite`, `explain`, and calibration all run `PASSES`, some of them not to the
end. A pass receives everything that it needs as arguments: none reads the Python stack, the
environment or results of another call. Passes that edit the graph are marked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx, nn
from torch.export import ExportedProgram

from qfx.cost.device_models import current_costs
from qfx.cost.model import Costs
from qfx.graph.capture import clone, graphs, trace
from qfx.graph.decomposition import open_operators
from qfx.host.source_text import released_source_texts
from qfx.match.base import Match
from qfx.match.matching import match
from qfx.match.module_smoothing import factors_noted, note_own_factors
from qfx.match.naming import known_names
from qfx.match.recurrent import stays_whole
from qfx.plan.plan import Plan
from qfx.plan.policy import decide
from qfx.rewriting.canonical import rewrite as to_canonical
from qfx.rewriting.codes import Provide
from qfx.rewriting.constants import as_constants
from qfx.rewriting.fusion import fuse
from qfx.rewriting.layouts import keep_channels_last
from qfx.rewriting.residuals import add_residuals
from qfx.rewriting.verify import checking, verify
from qfx.values.config import Config, Configurable
from qfx.values.select import check_names

_NO_COSTS = Costs()


@dataclass(frozen=True)
class Context:
    """The arguments of the passes besides the graph.

    `prefixes`: source expression of each module of the captured frame -> its path in the model.
    `around`: modules whose names patterns may also refer to; None if the caller of the passes
    checks the patterns itself. `costs`: the cost models of the CPU and of GPUs. `provide`: returns,
    for a graph, the function that puts packed weights into it. `training`: gradients are recorded
    at every matmul. `decided`: a function applied to the plan before the graph is edited, for
    callers that restrict the plan or add guards for the sizes and modules that it depends on.
    """

    config: Config
    costs: Costs = _NO_COSTS
    prefixes: Mapping[str, str] = field(default_factory=dict)
    around: Sequence[nn.Module] | None = ()
    provide: Callable[[fx.GraphModule], Provide] = as_constants
    training: bool = False
    decided: Callable[[Plan], Plan] = lambda plan: plan


@dataclass
class PassState:
    """A graph between two passes, and the results of the passes so far."""

    gm: fx.GraphModule
    matches: tuple[Match, ...] = ()
    plan: Plan = field(default_factory=lambda: Plan(()))
    given: frozenset[fx.Node] = frozenset()  # its nodes before it was edited


class Pass(NamedTuple):
    """One pass. `edits`: whether it changes the graph that the caller passed; other passes only
    read it."""

    name: str
    edits: bool
    run: Callable[[PassState, Context], Any]


def _open(work: PassState, context: Context) -> None:
    def stays(node: fx.Node) -> bool:
        return stays_whole(node, context.config, context.prefixes, context.training)

    open_operators(work.gm, stays)


def _match(work: PassState, context: Context) -> None:
    found = match(work.gm, context.prefixes)
    work.matches = tuple(m.recording() for m in found) if context.training else found


def _check_names(work: PassState, context: Context) -> None:
    if context.around is not None:
        check_names(context.config, known_names(work.matches, context.around))


def _decide(work: PassState, context: Context) -> None:
    factors = factors_noted(work.gm, work.matches)
    work.plan = context.decided(decide(work.matches, context.config, *context.costs, factors))


def _to_canonical(work: PassState, context: Context) -> None:
    work.given = frozenset(n for graph in graphs(work.gm) for n in graph.nodes)
    to_canonical(work.gm, work.plan, context.provide(work.gm))
    _verify(work)


def _fuse(work: PassState, context: Context) -> None:
    work.plan = work.plan.noting(fuse(work.gm))
    _verify(work)


def _lay_out(work: PassState, context: Context) -> None:
    keep_channels_last(work.gm)
    _verify(work)


def _add_residuals(work: PassState, context: Context) -> None:
    work.plan = work.plan.noting(add_residuals(work.gm))
    _verify(work)


def _verify(work: PassState) -> None:
    if checking():
        verify(work.gm, work.given)


PASSES = (
    Pass("open", True, _open),  # operators that hold several matmuls
    Pass("match", False, _match),
    Pass("check names", False, _check_names),
    Pass("decide", False, _decide),
    Pass("canonical", True, _to_canonical),
    Pass("fuse", True, _fuse),
    Pass("lay out", True, _lay_out),
    Pass("add residuals", True, _add_residuals),
)


def run_passes(
    gm: fx.GraphModule, context: Context, through: str = "add residuals", plan: Plan | None = None
) -> PassState:
    """Runs the passes up to the one named `through` on `gm`, which is edited. With a `plan`, the
    passes up to the decision are skipped.

    Raises UserError for a pattern that matches nothing, and for a recipe of another model.
    """
    names = [each.name for each in PASSES]
    first = 0 if plan is None else names.index("decide") + 1
    work = PassState(gm, plan=plan or Plan(()))
    for each in PASSES[first : names.index(through) + 1]:
        each.run(work, context)
    return work


@released_source_texts()
def rewrite(
    gm: nn.Module | ExportedProgram,
    config: Configurable = None,
    *,
    canonical: bool = False,
    training: bool = False,
) -> tuple[fx.GraphModule, Plan]:
    """Returns a copy of `gm` with its matmuls in int8, and the plan, which says for each matmul
    whether it became int8 or why it stays float.

        int8, plan = qfx.rewrite(qfx.trace(model, x), "w8a8")
        print(plan)

    `gm`: from `qfx.trace`, `torch.export.export` or any FX tool; it is not changed. Any other
    module is traced first. `config`: the name of a scheme, a Config, or whatever else `Config.of`
    takes.

    The weights are quantized and packed now, so later changes to them have no effect. If the graph
    does not know its shapes (traced without example inputs), gains cannot be predicted and every
    matmul that can be int8 is quantized. `training` keeps the float weights as parameters,
    quantizes them at every call and gives them straight-through gradients. `canonical` keeps
    readable operators for each matmul (docs/tour.md). Raises ValueError for a pattern of `config`
    that matches nothing and for a recipe of another model.
    """
    config = Config.of(config)
    copy = clone(gm) if isinstance(gm, fx.GraphModule) else trace(gm)
    if config.smoothing:
        note_own_factors(copy)
    context = Context(config, current_costs(), training=training)
    work = run_passes(copy, context, "canonical" if canonical else PASSES[-1].name)
    return clone(work.gm), work.plan  # the clone drops what the graph no longer uses
