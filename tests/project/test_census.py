"""The census counts what it should: its counter agrees with counts by hand, and its models run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.census import GAINS, NOWHERE, TABLE, counted, share
from benchmarks.census_models import FIELDS, build
from benchmarks.census_page import NOTES, PAGE, below_bar, page, read
from benchmarks.fields.vision import Only
from benchmarks.macs import ACTIVATIONS, EXPERTS, RECURRENT, by_weight, macs_of
from benchmarks.results_age import unmarked
from tests.conftest import on_threads
from tests.lib.pairs import LONG


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with on_threads(1):
        yield


class Attending(nn.Module):
    """Five queries of 8 features in 2 heads attend to seven keys, without a weight."""

    def forward(self, x: Tensor) -> Tensor:
        q, k = torch.ones(1, 2, 5, 4), torch.ones(1, 2, 7, 4)
        return F.scaled_dot_product_attention(q, k, k) + x


class Routed(nn.Module):
    """Six rows, of which four belong to two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 16, 8, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        offsets = torch.tensor([1, 4], dtype=torch.int32)
        return F.grouped_mm(x.bfloat16(), self.weight, offs=offsets)


class Twice(nn.Module):
    """Calls a weight twice: once as it is, once as a sum that the graph computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.weight), (self.weight + 1).T)


class Written(nn.Module):
    """Writes the input into a copy of a weight: what is multiplied then is no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        copy = self.weight * 1
        copy.add_(x)
        return x @ copy


class Packed(nn.Module):
    """An LSTM over two sequences, of 3 and 2 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(4, 6)

    def forward(self, x: Tensor) -> Any:
        return self.layers(nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2])))


class Query(nn.Module):
    """The first of an encoder's layers, as nn.TransformerEncoderLayer has it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


# module, shape of its input, multiply-accumulates by hand
COUNTS = {
    "linear": (nn.Linear(4, 6), (3, 4), {"linear": 3 * 4 * 6}),
    "linear, batches": (nn.Linear(4, 6), (2, 3, 4), {"linear": 6 * 4 * 6}),
    "conv 1-D": (nn.Conv1d(3, 8, 5, padding=2), (2, 3, 7), {"conv 1-D": 2 * 7 * 8 * 3 * 5}),
    "conv 2-D": (
        nn.Conv2d(3, 8, (3, 5), stride=2, padding=(1, 2)),
        (1, 3, 6, 8),
        {"conv 2-D": 3 * 4 * 8 * 3 * 15},
    ),
    "conv 3-D": (nn.Conv3d(2, 4, 2), (1, 2, 3, 4, 5), {"conv 3-D": 2 * 3 * 4 * 4 * 2 * 8}),
    "depthwise": (nn.Conv2d(8, 8, 3, groups=8), (1, 8, 5, 5), {"grouped conv": 9 * 8 * 9}),
    "grouped": (nn.Conv1d(8, 4, 3, groups=2), (1, 8, 5), {"grouped conv": 3 * 4 * 4 * 3}),
    "transposed": (
        nn.ConvTranspose1d(6, 4, 8, stride=4),
        (1, 6, 5),
        {"transposed conv": 5 * 6 * 4 * 8},
    ),
    "weight norm": (
        weight_norm(nn.Conv1d(3, 8, 5)),
        (1, 3, 9),
        {"conv 1-D, computed weight": 5 * 8 * 3 * 5},
    ),
    "lstm": (nn.LSTM(4, 6, 2), (5, 3, 4), {RECURRENT: 15 * 24 * (4 + 6 + 6 + 6)}),
    "lstm, both directions": (
        nn.LSTM(4, 6, 2, bidirectional=True, batch_first=True),
        (3, 5, 4),
        {RECURRENT: 15 * 2 * 24 * (4 + 6 + 12 + 6)},
    ),
    "lstm, projected": (
        nn.LSTM(4, 6, proj_size=2),
        (5, 3, 4),
        {RECURRENT: 15 * (24 * (4 + 2) + 6 * 2)},
    ),
    "lstm, packed": (Packed(), (3, 2, 4), {RECURRENT: 5 * 24 * (4 + 6)}),
    "gru": (nn.GRU(4, 6), (5, 3, 4), {RECURRENT: 15 * 18 * (4 + 6)}),
    "rnn": (nn.RNN(4, 6), (5, 3, 4), {RECURRENT: 15 * 6 * (4 + 6)}),
    "lstm cell": (nn.LSTMCell(4, 6), (3, 4), {RECURRENT: 3 * 24 * (4 + 6)}),
    "gru cell": (nn.GRUCell(4, 6), (3, 4), {RECURRENT: 3 * 18 * (4 + 6)}),
    "attention": (Attending(), (1,), {ACTIVATIONS: 2 * 5 * 7 * (4 + 4)}),
    "encoder layer": (
        Query(),
        (1, 5, 8),
        {"linear": 5 * 8 * (24 + 8 + 16 + 16), ACTIVATIONS: 2 * 5 * 5 * (4 + 4)},
    ),
    "experts": (Routed(), (6, 16), {EXPERTS: 4 * 16 * 8}),
    "twice": (Twice(), (3, 4), {"linear": 3 * 20, "linear, computed weight": 3 * 20}),
    "written": (Written(), (4, 4), {ACTIVATIONS: 4 * 4 * 4}),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_those_by_hand(name: str) -> None:
    module, shape, expected = COUNTS[name]
    only = Only(module).eval()
    assert dict(macs_of(only, {"x": torch.ones(shape)})) == expected


@pytest.mark.parametrize("name", ["resnet-50", "dcgan", "hifi-gan", "dlrm", "gcn"])
def test_the_sum_is_that_of_pytorchs_counter(name: str) -> None:
    """It knows no kinds, and neither recurrent layers, experts nor the CPU's fused attention."""
    model, inputs = build(TABLE[name], name)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs)
    assert sum(macs_of(model, inputs).values()) == counter.get_total_flops() // 2


class Mixed(nn.Module):
    """An int8 linear, a convolution, and an LSTM behind a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv = nn.Linear(64, 64), nn.Conv1d(64, 64, 3, groups=64)
        self.layers = nn.LSTM(64, 64)

    def forward(self, x: Tensor) -> Any:
        y = self.conv(self.linear(x).T[None])[0].T
        torch._dynamo.graph_break()
        return self._recurrent(y)

    @torch._dynamo.disable
    def _recurrent(self, y: Tensor) -> Any:
        return self.layers(y)


def test_shares_are_those_of_the_plan() -> None:
    row = counted(Mixed().eval(), {"x": torch.randn(34, 64)})
    linear, conv, lstm = 34 * 64 * 64, 32 * 64 * 3, 32 * 256 * 128
    assert row["macs"] == {"linear": linear, "grouped conv": conv, RECURRENT: lstm}
    assert row["gain 0"]["linear"] == linear
    float_ = by_weight(row["macs"]) - by_weight(row["gain 0"])
    assert sum(row["reasons"].values()) == float_ and row["reasons"][NOWHERE] >= lstm
    assert share(row, "gain 0") == linear / (linear + conv + lstm)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_captured_layers_count_as_in_float(kind: type[nn.RNNBase]) -> None:
    row = counted(Only(kind(64, 32, 2)).eval(), {"x": torch.randn(5, 3, 64)})
    assert row["macs"] == row["gain 0"] and {*row["macs"]} == {RECURRENT}


def test_ten_fields_have_five_models_each() -> None:
    assert len(FIELDS) == 10 and all(len(models) >= 5 for models in FIELDS.values())
    assert len(TABLE) == sum(map(len, FIELDS.values()))  # a name means one model
    assert {*GAINS} == {"gain 0", "default"}


# One of each file of models; `QFX_TEST_PROFILE=long` runs all.
FEW = ("bert", "mobilenet-v3", "dit", "tacotron-2", "crnn", "gat")


@pytest.mark.parametrize("name", [*TABLE] if LONG else FEW)
def test_a_model_runs_and_multiplies_by_weights(name: str) -> None:
    assert by_weight(macs_of(*build(TABLE[name], name))) > 0


# --- the page ---


def test_the_page_says_what_the_results_say() -> None:
    assert unmarked(PAGE.read_text()) == unmarked(page(read()))


def test_every_model_was_counted() -> None:
    assert [(row["model"], row["failure"]) for row in read()] == [(name, "") for name in TABLE]


def test_int8_and_reasons_add_up_to_the_count_that_knows_no_qfx() -> None:
    """Captured graphs multiply nothing that the float forward does not."""
    for row in read():
        more = [k for g in GAINS for k, n in row[g].items() if n > row["macs"].get(k, 0)]
        assert (row["model"], more) == (row["model"], [])
        parts = by_weight(row["gain 0"]) + sum(row["reasons"].values())
        assert (row["model"], parts) == (row["model"], by_weight(row["macs"]))


def test_a_field_below_the_bar_is_explained_and_no_other() -> None:
    assert below_bar(read()) == [name for name in FIELDS if name in NOTES]


def test_means_count_each_model_and_each_field_once() -> None:
    """Whatever their sizes are. The second field has one model that is float altogether."""

    def row(field: str, model: str, linear: int, int8: int) -> dict[str, Any]:
        counts = {"macs": {"linear": linear, ACTIVATIONS: 5}, "reasons": {}, "torch": "2.13"}
        shares = {"gain 0": {"linear": int8, ACTIVATIONS: 5}, "default": {}}
        return {"field": field, "model": model, "commit": "0", **counts, **shares}

    first, second, *_ = FIELDS
    rows = [row(first, "a", 1000, 1000), row(first, "b", 10, 5), row(second, "c", 1000, 0)]
    text = page(rows)
    assert f"| {first} | 2 | 75.0 % | 0.0 % | linear 25.0 |" in text
    assert f"| {second} | 1 | 0.0 % | 0.0 % | linear 100.0 |" in text
    assert "| mean of the fields | 3 | 37.5 % | 0.0 % | linear 62.5 |" in text
    assert below_bar(rows) == [first, second]
