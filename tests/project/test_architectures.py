"""Six different architectures keep the bars of the survey, and every row below one is explained."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from benchmarks.measures import PARTS, Row, coverage, main_output, plans, training
from benchmarks.results_age import unmarked
from benchmarks.survey_page import (
    COSINE_BAR,
    NOTES,
    PAGE,
    SQNR_BAR,
    missed,
    page,
    read,
)
from benchmarks.zoo import TABLE, build
from qfx.ops.single_tensors import sqnr
from qfx.report.report import Report
from tests.conftest import on_threads


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with on_threads(1):
        yield


# transformers caches functions that Dynamo then traces
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
# Linears stored transposed, shared layers, einsum, two stacks, convolutions, sound.
@pytest.mark.parametrize("name", ["gpt2", "albert", "xlnet", "t5", "vit", "wav2vec2"])
def test_architecture(name: str) -> None:
    row: Row = {}
    for part in PARTS:
        row |= part(*build(TABLE[name]), "eager")
    assert row["linears"] > 0 and row["skipped"] == [] and row["unlisted"] == {}
    assert "no reason" not in row["reasons"]
    assert row["int8"] + sum(row["reasons"].values()) == row["matmuls"]
    assert row["sqnr_db"] >= SQNR_BAR
    assert min(row["int8"], row["int8_in_training"]) >= row["linears"]
    unserved = "qfx has no int8 for them: Conv1d"  # the layers that read sound
    assert row["lost"] == [w for w in row["warnings"] if unserved not in w] == []
    assert row["gradient_cosine"] >= COSINE_BAR


class Hidden(nn.Module):
    """Products inside an operator that no spelling of a matmul names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": torch.linalg.matrix_power(self.linear(x), 3)}


def test_coverage_finds_what_explain_does_not_list(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {"x": torch.randn(8, 8)}
    row = coverage(Hidden(), inputs, "eager")
    assert (row["linears"], row["skipped"]) == (1, [])
    assert row["unlisted"] == {"torch.linalg.matrix_power": 1}
    monkeypatch.setattr("qfx.explain", lambda *inputs, **options: Report((), 1))
    assert coverage(Hidden(), inputs, "eager")["skipped"] == ["linear"]


class Cut(nn.Module):
    """A linear whose weight gets no gradient once the model is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.cut = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.cut(x)
        return {"y": self.kept(x) + (y.detach() if torch.compiler.is_compiling() else y)}


def test_training_finds_a_lost_gradient() -> None:
    row = training(Cut(), {"x": torch.randn(4, 8)}, "eager")
    assert row["lost"] == ["cut.bias", "cut.weight"] and row["gradient_cosine"] < COSINE_BAR


def test_symbolic_sizes_lose_nothing() -> None:
    """Ranges without a lower end, of attention biases."""
    model, first = build(TABLE["bloom"])
    calls, ran = (first, build(TABLE["bloom"], 3, 21)[1]), []
    options = {"minimum_gain": 0, "inner": "eager"}
    for dynamic in (False, True):
        torch._dynamo.reset()
        fast = torch.compile(model, backend="qfx", dynamic=dynamic, options=options)
        with plans() as seen, torch.no_grad():
            pairs = [(main_output(model(**i)), main_output(fast(**i))) for i in calls]
        assert min(sqnr(*pair) for pair in pairs) >= SQNR_BAR
        ran.append([plan.quantized for plan in seen.values()])
    known, symbolic = ran
    assert len(known) == 2 and symbolic == known[:1]


def test_the_page_is_what_the_results_say() -> None:
    assert unmarked(PAGE.read_text()) == unmarked(page(read()))


def test_the_survey_is_wide_and_what_it_misses_is_explained() -> None:
    """A survey that was stopped early still counts from 50 on."""
    assert len(read()) >= 50
    short = [row["architecture"] for row in read() if missed(row)]
    assert short == [row["architecture"] for row in read() if row["architecture"] in NOTES]
