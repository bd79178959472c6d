"""An optimizer that trains nothing of an int8 linear but its bias says so, once."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qfx

SAID = "trains the biases of {} int8 linears"


class Adapted(nn.Module):
    """A linear with a pair of low rank beside it, as adapters of everybody have."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(64, 4, bias=False)
        self.b = nn.Linear(4, 96, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + self.b(self.a(x))


def _model() -> nn.Sequential:
    layers = (nn.Embedding(8, 64), nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64))
    return qfx.quantize_(nn.Sequential(*layers))  # type: ignore[return-value]


def _adapted() -> nn.Sequential:
    model = _model()
    model[1] = Adapted(model[1])
    return model


def _frozen() -> nn.Sequential:
    model = _model()
    for linear in (model[1], model[3]):
        linear.bias.requires_grad_(False)
    return model


def _loaded() -> nn.Sequential:
    model = _model()
    model.load_state_dict(_model().state_dict(), assign=True)
    return model


def _steps(model: nn.Module, parameters: Iterable[Tensor], count: int = 2) -> list[str]:
    optimizer = torch.optim.AdamW(parameters)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(count):
            model(torch.arange(8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(w.message) for w in told if "int8 linears" in str(w.message)]


MADE: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "quantized": (_model, 2),
    "copied": (lambda: copy.deepcopy(_model()), 2),
    "loaded": (_loaded, 2),
    "one float": (lambda: qfx.quantize_(_model_of_two(), qfx.Config(skip=["2"])), 1),
    "adapted": (_adapted, 0),
    "frozen biases": (_frozen, 0),
}


def _model_of_two() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(8, 64), nn.Linear(64, 96), nn.Linear(96, 64))


@pytest.mark.parametrize("name", MADE)
def test_biases_alone_are_one_warning(name: str) -> None:
    make, count = MADE[name]
    model = make()
    told = _steps(model, model.parameters())
    assert len(told) == (1 if count else 0), told
    assert not count or SAID.format(count) in told[0]


def test_an_optimizer_of_other_parameters_is_silent() -> None:
    model = _model()
    assert not _steps(model, model[2].parameters())


def test_a_second_optimizer_is_told_too() -> None:
    model = _model()
    assert [len(_steps(model, model.parameters(), count=1)) for _ in range(2)] == [1, 1]
