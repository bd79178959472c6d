"""The list of passes: what they may edit, what they are given, and what becomes of their faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import exc

import qfx
from qfx import pipeline
from qfx.graph.capture import clone, graphs
from qfx.io.errors import UserError
from qfx.pipeline import PASSES, Context, Pass, PassState, run_passes
from qfx.plan.plan import Plan
from tests.lib.models import FEATURES, Block, compiled
from tests.lib.pairs import every
from tests.rewriting.test_residuals import Residual, image

X = torch.randn(2, 5, FEATURES)
CONTEXT = Context(qfx.Config(minimum_gain=0))
FAULTS = (
    ArithmeticError, AssertionError, AttributeError, IndexError, KeyError, NotImplementedError,
    OSError, RuntimeError, StopIteration, TypeError, UnicodeError, ValueError, Warning,
)  # fmt: skip


def _text(work: PassState) -> list[str]:
    return [node.format_node() or "" for graph in graphs(work.gm) for node in graph.nodes]


@pytest.mark.parametrize("each", PASSES, ids=lambda each: each.name)
def test_a_pass_edits_only_if_it_says_so(each: Pass) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.TransformerEncoderLayer(FEATURES, 2, 8, batch_first=True))
    if each.name == "lay out":
        channels = X.shape[1]
        model = nn.Sequential(*(nn.Conv1d(channels, channels, 3, padding=1) for _ in range(2)))
    if each.name == "add residuals":
        model = Residual("3x3", torch.add)
    work = PassState(clone(_captured(model.eval(), _input_of(model))))
    for before in PASSES[: PASSES.index(each)]:
        before.run(work, CONTEXT)
    text = _text(work)
    each.run(work, CONTEXT)
    assert (_text(work) != text) == each.edits


def _input_of(model: nn.Module) -> Tensor:
    return image() if isinstance(model, Residual) else X


def _captured(model: nn.Module, *inputs: Tensor) -> torch.fx.GraphModule:
    """As Dynamo hands it to a backend: with operators that hold several matmuls."""
    found: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, examples: object) -> Any:
        found.append(gm)
        return gm.forward

    with torch.no_grad():
        torch.compile(model, backend=keep)(*inputs)
    torch._dynamo.reset()
    return found[0]


def test_passes_can_be_run_in_two_parts() -> None:
    whole, parts = (clone(qfx.trace(Block(), X)) for _ in range(2))
    run_passes(whole, CONTEXT)
    plan = run_passes(parts, CONTEXT, "decide").plan
    run_passes(parts, CONTEXT, plan=plan)
    assert str(whole.graph) == str(parts.graph) and plan.quantized > 0


def _name(what: Pass | type[BaseException]) -> str:
    return what.name if isinstance(what, Pass) else what.__name__


@pytest.mark.parametrize("at, kind", every(PASSES, FAULTS), ids=_name)
def test_a_fault_of_any_kind_in_any_pass_leaves_the_graph_float(
    at: Pass, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    _plant(at, kind("planted"), monkeypatch)
    model = nn.Linear(8, 8)
    with torch.no_grad(), pytest.warns(UserWarning, match="qfx failed on a graph and left it"):
        assert torch.equal(compiled(model)(X[..., :8]), model(X[..., :8]))


@pytest.mark.parametrize("at", PASSES, ids=lambda at: at.name)
def test_what_the_user_did_wrong_is_raised(at: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    _plant(at, UserError("said so"), monkeypatch)
    with torch.no_grad(), pytest.raises(Exception, match="said so"):
        compiled(nn.Linear(8, 8))(X[..., :8])


@pytest.mark.parametrize(
    "at, kind", every(PASSES, [exc.RestartAnalysis, exc.SkipFrame, KeyboardInterrupt]), ids=_name
)
def test_what_dynamo_catches_passes_through(
    at: Pass, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    _plant(at, kind(), monkeypatch)
    captured = _captured(nn.Linear(8, 8), X[..., :8])
    with pytest.raises(kind):
        qfx.backend(captured, [*captured.graph.find_nodes(op="placeholder")], options={})


def _plant(at: Pass, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(work: PassState, context: Context) -> None:
        raise error

    planted = tuple(each._replace(run=broken) if each is at else each for each in PASSES)
    monkeypatch.setattr(pipeline, "PASSES", planted)


class Owner(nn.Module):
    """A module one of whose methods rewrites another model."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(8, 8)

    def quantized(self, model: nn.Module, **options: Any) -> Plan:
        _, plan = qfx.rewrite(qfx.trace(model), qfx.Config(minimum_gain=0, **options))
        return plan


def test_a_typo_is_one_whoever_calls_rewrite() -> None:
    """The names of the module that calls are none of the model's."""
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(ValueError, match="the pattern 'lm_head' matches nothing; there is: 0"):
        Owner().quantized(model, skip=["lm_head"])
    assert Owner().quantized(model, skip=["0"]).quantized == 0
