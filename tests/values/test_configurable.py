"""A scheme's name, a Scheme, a dict of options and a Config are taken wherever one of them is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import qfx
from qfx.nn.linear import Linear

W4A8 = qfx.Config(scheme="w4a8").chosen
SAME: dict[str, Any] = {
    "a name": "w4a8",
    "a Scheme": W4A8,
    "a dict": {"scheme": "w4a8"},
    "a Config": qfx.Config(scheme="w4a8"),
}
X = torch.randn(16, 128, generator=torch.Generator().manual_seed(0))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 32)).eval()


def _quantized(given: Any) -> str:
    return str(qfx.quantize_(net(), given)[0].scheme)


def _rewritten(given: Any) -> str:
    _, plan = qfx.rewrite(net(), given)
    return str(plan)


def _calibrated(given: Any) -> str:
    recipe = qfx.calibrate(net(), X, given, max_sqnr_loss_db=100.0, progress=False)
    return str(sorted({site.scheme.w.bits for site in recipe.sites if site.scheme}))


def _explained(given: Any) -> str:
    return str([row.scheme for row in qfx.explain(net(), X, options=given).rows])


def _learned(given: Any) -> str:
    return str(qfx.prepare_qat(net(), config=given)[0].scheme)  # type: ignore[union-attr]


TAKES: dict[str, Callable[[Any], str]] = {
    "quantize_": _quantized,
    "rewrite": _rewritten,
    "calibrate": _calibrated,
    "explain": _explained,
}


@pytest.mark.parametrize("who", TAKES)
def test_all_spellings_mean_the_same(who: str) -> None:
    found = {how: TAKES[who](given) for how, given in SAME.items()}
    assert len({*found.values()}) == 1 and found["a name"] != TAKES[who]("w8a8")


@pytest.mark.parametrize("who", [*TAKES, "prepare_qat"])
def test_others_are_refused_with_what_can_be_taken(who: str) -> None:
    take = TAKES.get(who, _learned)
    with pytest.raises(TypeError, match=r"the name of a scheme \(w8a8, .*got int: 4"):
        take(4)
    with pytest.raises(ValueError, match="unknown scheme 'w3'"):
        take("w3")
    with pytest.raises(ValueError, match=r"unknown option 'sheme', did you mean scheme"):
        take({"sheme": "w8a8"})


def test_a_configuration_is_no_example_input() -> None:
    with pytest.raises(TypeError, match=r"'w8a8' is no example input .* config="):
        qfx.prepare_qat(net(), "w8a8")
    with pytest.raises(TypeError, match=r"'w8a8' is no example input .* config="):
        qfx.prepare_binary(net(), "w8a8")


def test_one_tensor_is_one_batch() -> None:
    both = [qfx.calibrate(net(), given, "w8a8-static", progress=False).sites for given in (X, [X])]
    assert both[0] == both[1]


MODULES: dict[str, Callable[..., Any]] = {
    "Linear": lambda **how: qfx.nn.Linear(64, 32, **how),
    "a named scheme": lambda **how: qfx.nn.Linear(64, 32, scheme="w4a8", **how),
    "LSQLinear": lambda **how: qfx.nn.LSQLinear(64, 32, **how),
    "BinaryLinear": lambda **how: qfx.nn.BinaryLinear(64, 32, **how),
    "SignLinear": lambda **how: qfx.nn.SignLinear(64, 32, **how),
    "Embedding": lambda **how: qfx.nn.Embedding(64, 32, **how),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_take_a_device_and_a_type(name: str) -> None:
    made = MODULES[name](device="cpu", dtype=torch.bfloat16)
    x: Any = torch.arange(3) if name == "Embedding" else torch.randn(3, 64).bfloat16()
    assert made(x).dtype == torch.bfloat16
    assert MODULES[name](device="meta").state_dict()[next(iter(made.state_dict()))].is_meta
    if isinstance(made, Linear):
        assert made.weight.dtype == torch.bfloat16
        assert qfx.nn.Linear.from_float(nn.Linear(64, 32), "w4a8").scheme == W4A8.at(64)
