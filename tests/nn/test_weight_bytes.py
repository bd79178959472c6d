"""How much of a model is quantized, by kinds of modules, and who is warned."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import qfx
from qfx.nn.weight_bytes import weight_bytes
from tests.lib.pairs import every
from tests.lib.prepared import PREPARE, K


class Experts(nn.Module):
    """As transformers has them: one parameter for all."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, K, K))


class Mixture(nn.Module):
    """A linear that runs, beside what does not become int8."""

    def __init__(self, *others: nn.Module) -> None:
        super().__init__()
        self.first, self.others = nn.Linear(K, K), nn.ModuleList(others)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        return y


def _tied() -> Mixture:
    table = nn.Embedding(8 * K, K)
    head = nn.RNN(K, 8 * K, bias=False)  # [8 K, K] is the shape of its weight
    head.weight_ih_l0 = table.weight
    return Mixture(table, head)


def _in_groups(size: int) -> nn.Module:
    """Groups of 4 outputs are too small for int8."""
    return nn.Conv2d(K * K // 4, K * K, size, groups=K * K // 4, bias=False)


_LINEAR = 4 * K * K
# A model -> bytes in float that become codes, and of weights that multiply and do not.
COUNTED: dict[str, tuple[Callable[[], Mixture], dict[str, int]]] = {
    "experts": (lambda: Mixture(Experts(4)), {"Experts": 4 * _LINEAR}),
    "a convolution": (lambda: Mixture(_in_groups(3)), {"Conv2d": 9 * _LINEAR}),
    "an RNN": (lambda: Mixture(nn.RNN(K, K)), {"RNN": 2 * _LINEAR}),
    "a table that is looked up": (lambda: Mixture(nn.Embedding(9 * K, K)), {}),
    "norms": (lambda: Mixture(nn.LayerNorm(K), nn.BatchNorm2d(K)), {}),
    "a table tied to what multiplies": (_tied, {"RNN": 72 * _LINEAR}),
    "half": (lambda: Mixture(_in_groups(1)), {"Conv2d": _LINEAR}),
}


@pytest.mark.parametrize("row, how", every(COUNTED, PREPARE))
def test_the_whole_model_is_counted(row: str, how: str, caplog: pytest.LogCaptureFixture) -> None:
    make, expected = COUNTED[row]
    model = make()
    before = sum(p.numel() * 4 for p in {*model.parameters()} if p.is_floating_point())
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.INFO, "qfx"):
        warnings.simplefilter("always")
        PREPARE[how](model)
    found = weight_bytes(model)
    assert found.quantized == _LINEAR and found.multiplying == expected
    assert abs(found.quantized + sum(found.floating.values()) - before) < 20 * K  # steps, vectors
    few = sum(expected.values()) > _LINEAR
    assert len(caught) == few and str(found) in caplog.text
    for kind in expected if few else ():
        assert kind in str(caught[0].message) and f"({found.share:.1%})" in str(caught[0].message)


@pytest.mark.parametrize(
    "config", [qfx.Config(only=("*",)), qfx.Config(only=("first",)), qfx.Config(skip=("skipped",))]
)
def test_what_was_asked_for_is_no_warning(config: qfx.Config) -> None:
    model = Mixture(Experts(4))
    model.skipped = nn.Linear(K, K)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qfx.quantize_(model, config)


def test_a_model_without_linears_says_what_it_has() -> None:
    with pytest.raises(ValueError, match=r"no nn.Linear inside it; .*float: RNN 8\.2 kB"):
        qfx.quantize_(nn.Sequential(nn.RNN(K, K)))


def test_an_expanded_weight_takes_no_more_than_its_storage() -> None:
    model = nn.Bilinear(K, K, 1, bias=False)
    model.weight = nn.Parameter(torch.ones(1).expand(1 << 20, K, K))
    assert weight_bytes(model).multiplying == {"Bilinear": 4}
