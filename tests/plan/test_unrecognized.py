"""torch.compile warns once of a graph whose weights mostly multiply in what has no int8."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qfx
from tests.lib.decoders import decoder, ids
from tests.lib.experts_blocks import block_of, routed

K = 32


@pytest.fixture(autouse=True)
def recurrent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        yield


def _cnn() -> nn.Module:
    """Convolutions of groups of channels, which are no matmuls."""
    return nn.Sequential(nn.Conv2d(K, 2 * K, 3, groups=K), nn.Flatten(), nn.Linear(8 * K, 2))


class Chosen(nn.Module):
    """Weights of experts that are gathered for each of two choices, and quantized nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, K, K))

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, :4].topk(2).indices
        return torch.einsum("tk,tsnk->tsn", x, self.weight[chosen])


MOSTLY_FLOAT: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "experts": (Chosen, torch.randn(5, K), "einsum 16.4 kB"),
    "RNN": (lambda: nn.RNN(K, K), torch.randn(5, 2, K), "RNN 8.2 kB"),
    "CNN": (_cnn, torch.randn(1, K, 4, 4), "Conv2d 2.3 kB"),
}


def said(model: Any, *calls: Any, **options: Any) -> list[str]:
    compiled = torch.compile(model, backend="qfx", options={"inner": "eager", **options})
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        for inputs in calls:
            compiled(inputs)
    return [str(w.message) for w in caught if str(w.message).startswith("qfx")]


@pytest.mark.parametrize("row", MOSTLY_FLOAT)
def test_kinds_that_have_no_int8_are_named(row: str) -> None:
    make, inputs, kind = MOSTLY_FLOAT[row]
    (warning,) = said(make(), inputs)
    assert f"since qfx has no int8 for them: {kind}" in warning


def test_biases_of_int8_experts_are_no_weights() -> None:
    """They are matrices [E, N], which the operator of a block adds."""
    block = qfx.nn.Experts.from_float(block_of("gpt-oss"))

    def run(x: Tensor) -> Tensor:
        y: Tensor = block(x, *routed()[1:])
        return y

    assert said(run, routed()[0]) == []


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_costs_decide_is_no_warning(name: str) -> None:
    """Small linears stay float by cost, and embeddings are looked up."""
    assert said(decoder(name), ids(1, 2), minimum_gain=99.0) == []


def test_what_was_asked_for_is_no_warning() -> None:
    assert said(_cnn(), torch.randn(1, K, 4, 4), only=("2",)) == []


def test_graphs_of_other_sizes_say_it_once() -> None:
    calls = (torch.randn(5, n, K) for n in (2, 3, 4))
    assert len(said(nn.RNN(K, K), *calls)) == 1


class Helper(nn.Module):
    """A graph break stands between a small convolution and large linears."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 3, padding=1, groups=2)
        self.linear = nn.Linear(16 * K, 16 * K)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x[:, None].repeat(1, 2, 1))[:, 0]
        torch._dynamo.graph_break()
        y: Tensor = self.linear(x)
        return y


def test_a_graph_of_few_of_the_weights_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "qfx"):
        assert said(Helper(), torch.randn(2, 16 * K)) == []
    assert "Conv1d 0.0 kB" in caplog.text


def test_a_graph_without_weights_is_no_warning() -> None:
    assert said(nn.ReLU(), torch.randn(2)) == []
