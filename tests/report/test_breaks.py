"""explain passes on what Dynamo says of code that it does not capture, and reports what it does."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import qfx
from qfx.report.breaks import BEFORE
from qfx.report.html import page
from tests.lib.models import FEATURES, Block

X = torch.randn(2, 5, FEATURES)
ALL = {"minimum_gain": 0}


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.fc(x))


class Around(nn.Module):
    """Two linears, each in a module of its own, and between them what `between` does."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.first, self.last, self.between = _Layer(), _Layer(), between

    def forward(self, x: Tensor) -> Tensor:
        y = self.between(self.first(x))
        return self.last(y[0] if isinstance(y, tuple) else y)


def _recurrent(kind: Any) -> nn.Module:
    return kind(FEATURES, FEATURES, batch_first=True)


class Disabled(_Layer):
    @torch._dynamo.disable
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def _branches(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


class Bare(nn.Module):
    """A linear beside a recurrent layer: Dynamo gives up the whole function."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.fc = _recurrent(nn.RNN), nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.rnn(x)[0])


ALLOW = "Set torch._dynamo.config.allow_rnn=True"
# what is between the linears -> what Dynamo says of it, and the rows of what stays float
BREAKS: dict[str, tuple[Any, str, list[str]]] = {
    "RNN": (_recurrent(nn.RNN), ALLOW, ["between"]),
    "disabled": (Disabled(), "since it was wrapped with", ["between.fc"]),
    "branch": (_branches, "data-dependent branching", []),
    "script": (torch.jit.script(nn.ReLU()), "torch.jit.script", []),
    "nothing": (nn.ReLU(), "", []),
}


@pytest.mark.parametrize("name", BREAKS)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_what_dynamo_says_is_passed_on_and_what_it_compiles_is_reported(name: str) -> None:
    between, phrase, stays = BREAKS[name]
    report = qfx.explain(Around(between), X, options=ALL)
    assert [row.module for row in report.rows if row.scheme == "float"] == stays
    assert [row.module for row in report.rows if row.scheme != "float"] == ["first.fc", "last.fc"]
    assert any(phrase in line for line in report.breaks) == bool(phrase)
    assert phrase in str(report) and phrase in page(report).replace("&#39;", "'")


def test_a_function_that_dynamo_gave_up_before() -> None:
    """Dynamo says again why, and there is no second reason for its linears."""
    model = Bare()
    torch.compile(model, backend="eager")(X)
    with pytest.warns(UserWarning, match=f"gives up all of this callable.*{re.escape(ALLOW)}"):
        report = qfx.explain(model, X, options=ALL)
    assert [(row.module, row.scheme) for row in report.rows] == [("rnn", "float"), ("fc", "float")]
    assert "recompile limit" not in str(report)
    assert len(report.breaks) == 1 and ALLOW in report.breaks[0]
    assert qfx.explain(Block(), X, options=ALL).breaks == ()


def test_what_dynamo_said_of_code_that_it_runs_again() -> None:
    model = Around(Disabled())
    first, second = (qfx.explain(model, X, options=ALL).breaks for _ in range(2))
    assert {BEFORE + line for line in first} <= {*second}


class Called(nn.Module):
    """The code of its forward serves every module in it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.step(x)

    def step(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y[0] if isinstance(y, tuple) else y


# how two modules come to share the code that Dynamo looks at first
SHARED: dict[str, Callable[[nn.Module], Any]] = {
    "a class of torch.nn": lambda m: m if isinstance(m, nn.RNN) else nn.Sequential(m).eval(),
    "a class": lambda m: Called(m).eval(),
    "a method": lambda m: Called(m).eval().step,
    "a partial": lambda m: partial(Called(m).eval()),
}


@pytest.mark.parametrize("name", SHARED)
def test_a_model_after_one_that_dynamo_gave_up(name: str) -> None:
    """Dynamo skips such code silently, whatever module it runs for."""
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="gives up all of this callable"):
        qfx.explain(SHARED[name](_recurrent(nn.RNN)), X, options=ALL)
    graphs: list[fx.GraphModule] = []

    def captured(gm: fx.GraphModule, inputs: object) -> Any:
        graphs.append(gm)
        return gm.forward

    plain = SHARED[name](nn.Linear(FEATURES, FEATURES))
    torch.compile(plain, backend=captured)(X)  # explain leaves nothing for it to skip
    torch.compile(SHARED[name](_recurrent(nn.RNN)), backend="eager")(X)
    report = qfx.explain(plain, X, options=ALL)
    assert len(graphs) == 1 and (report.graphs, report.quantized) == (1, 1)
    assert len(qfx.calibrate(plain, [X], qfx.Config(minimum_gain=0)).sites) == 1


def test_int8_modules_that_dynamo_does_not_capture_are_int8() -> None:
    report = qfx.explain(Around(qfx.quantize_(Disabled())), X, options=ALL)
    (row,) = (row for row in report.rows if row.module == "between.fc")
    assert (report.quantized, row.scheme) == (3, "xa8r_ws8r_h64")
    assert row.reason == "an int8 module, qfx.nn.Linear, in code that Dynamo does not capture"
    assert row.sqnr_db is not None and row.int8_s and row.shape == "10x32x32"
