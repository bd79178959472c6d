"""Matmuls that int8 does not suit: angles of sines and cosines, weights of few features. (P1)"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qfx
from benchmarks.survey_page import SQNR_BAR
from qfx.match.matching import match
from qfx.ops.single_tensors import sqnr
from qfx.plan.plan import Plan
from qfx.plan.policy import decide
from qfx.values.limits import LEAST_K
from tests.lib.costs import Prices

ALL = {"minimum_gain": 0, "inner": "eager"}
K, N = 32, 16


class Of(nn.Module):
    """Some function of a linear of K features, whose output is [2, 5, N]."""

    def __init__(self, function: Callable[[Tensor], Any], features: int = K) -> None:
        super().__init__()
        self.fourier, self.function = nn.Linear(features, N), function
        self.scale = nn.Parameter(torch.rand(N))

    def forward(self, x: Tensor) -> Any:
        return self.function(self.fourier(x))


def plan_of(model: nn.Module, *inputs: Tensor, **options: Any) -> Plan:
    config = qfx.Config(**{"minimum_gain": 0, **options})
    return decide(match(qfx.trace(model, *inputs)), config, Prices(2.0))


ANGLES: dict[str, Callable[[Tensor], Any]] = {
    "sin": torch.sin,
    "method": lambda y: y.cos(),
    "in place": lambda y: y.sin_(),
    "scaled": lambda y: torch.sin(2 * math.pi * y),
    "both, of a slice": lambda y: torch.cat([y[..., :4].sin(), y.cos()], -1),
    "one of two users": lambda y: (y.relu(), (-y).cos()),
    "repeated": lambda y: torch.cat((y, y), dim=-1).transpose(1, 2).float().cos(),
    "shifted and reduced": lambda y: ((y + 1) / 3 % (2 * math.pi)).cos(),
    "aten": lambda y: torch.ops.aten.sin.default(torch.ops.aten.mul.Tensor(y, 3.0)),
    "polar": lambda y: torch.polar(torch.ones(2, 5, N), y),
    "its sine is added to another value": lambda y: y.relu() + (2 * y).sin(),
}
NO_ANGLES: dict[str, Callable[[Tensor], Any]] = {
    "nothing": lambda y: y,
    "of a function": lambda y: y.tanh().sin(),
    "an activation": lambda y: torch.relu(y).sin(),
    "a norm": lambda y: nn.functional.layer_norm(y, (N,)).cos(),
    "the length of polar": lambda y: torch.polar(y, torch.ones(2, 5, N)),
    "after another matmul": lambda y: (y @ torch.ones(N, N)).sin(),
    "added to its sine": lambda y: y + torch.sin(3 * y) ** 2 / 3,
    "reshaped and added to its sine": lambda y: _snake(y.reshape(2, -1)),
    "added to another value, then to its sine": lambda y: _snake(y + torch.ones(N)).tanh(),
}


def _snake(y: Tensor) -> Tensor:
    return y + 0.5 * torch.sin(2 * y).pow(2)


@pytest.mark.parametrize("name", ANGLES)
def test_an_angle_stays_float(name: str) -> None:
    (entry,) = plan_of(Of(ANGLES[name]), torch.randn(2, 5, K)).entries
    assert entry.scheme is None and "absolute error into one of phase" in entry.reason


@pytest.mark.parametrize("name", NO_ANGLES)
def test_what_is_no_angle_is_int8(name: str) -> None:
    first, *_ = plan_of(Of(NO_ANGLES[name]), torch.randn(2, 5, K)).entries
    assert first.scheme is not None


def test_positions_of_rotary_embeddings_stay_float() -> None:
    """A matmul of two activations, as of models before transformers 5."""

    def angles(frequencies: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        freqs = (frequencies[None, :, None].expand(2, -1, 1) @ positions[:, None, :]).mT
        emb = torch.cat((freqs, freqs), -1)
        return emb.cos(), emb.sin()

    gm = qfx.trace(torch.fx.symbolic_trace(angles), torch.rand(8), torch.rand(2, 5))
    (entry,) = decide(match(gm), qfx.Config(), Prices(2.0)).entries
    assert entry.scheme is None and "phase" in entry.reason


def test_the_least_number_of_features_is_that_of_the_count() -> None:
    """Of an output: 6 operations more, and of K multiply-adds three quarters less. (P1)"""
    saves = [k for k in range(1, 65) if k * (1 - 1 / 4) >= 6]
    assert saves[0] == LEAST_K
    for features in (1, 2, LEAST_K - 1, LEAST_K):
        (entry,) = plan_of(Of(torch.relu, features), torch.randn(2, 5, features)).entries
        assert (entry.scheme is None) == (features < LEAST_K)
        assert ("more operations than it saves" in entry.reason) == (features < LEAST_K)


class Fourier(nn.Module):
    """Features of coordinates, and a linear that reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.fourier, self.fc = nn.Linear(2, K, bias=False), nn.Linear(2 * K, N)
        with torch.no_grad():
            self.fourier.weight.normal_()

    def forward(self, x: Tensor) -> Tensor:
        angles = 2 * math.pi * self.fourier(2 * x - 1)
        return self.fc(torch.cat([angles.sin(), angles.cos()], -1))


def fourier() -> Fourier:
    torch.manual_seed(0)
    return Fourier().eval()


def schemes(report: qfx.Report) -> dict[str, bool]:
    return {row.module: row.scheme != "float" for row in report.rows}


@pytest.mark.parametrize("options", [{}, {"only": ["fourier"]}, {"release_weights": True}])
def test_neither_only_nor_released_weights_ask_for_int8(options: dict[str, Any]) -> None:
    (first, _) = plan_of(fourier(), torch.rand(4, 2), **options).entries
    assert first.scheme is None and "phase" in first.reason


def test_a_recipe_that_names_it_wins() -> None:
    model, x = fourier(), torch.rand(4, 2)
    site = qfx.SiteRecipe("fourier", 0, K, 2, qfx.Scheme())
    with torch.no_grad():
        assert schemes(qfx.explain(model, x, options={**ALL, "recipe": qfx.Recipe((site,))})) == {
            "fourier": True,
            "fc": True,
        }
        pinned = qfx.pin(model, x, options=ALL)
        assert [(s.name, s.scheme is None) for s in pinned.sites] == [
            ("fourier", True),
            ("fc", False),
        ]
    given = qfx.quantize_(fourier(), qfx.Config(recipe=qfx.Recipe((site,))))
    assert isinstance(given.fourier, qfx.nn.Linear)


def test_calibration_and_modules_leave_it_float(caplog: pytest.LogCaptureFixture) -> None:
    batches = [torch.rand(32, 2) for _ in range(2)]
    config = qfx.Config(minimum_gain=0)
    recipe = qfx.calibrate(fourier(), batches, config, progress=False)
    assert [s.name for s in recipe.sites] == ["fc"]
    with caplog.at_level(logging.INFO, "qfx"):
        model = qfx.quantize_(fourier())
    assert type(model.fourier) is nn.Linear and isinstance(model.fc, qfx.nn.Linear)
    assert "K=2: below 8 features" in caplog.text
    x, without = batches[0], {**ALL, "skip": ["fourier"]}
    with torch.no_grad():
        found = torch.compile(fourier(), backend="qfx", options=ALL)(x)
        torch._dynamo.reset()
        assert torch.equal(found, torch.compile(fourier(), backend="qfx", options=without)(x))
        skipped = qfx.quantize_(fourier(), qfx.Config(skip=("fourier",)))
        assert torch.equal(model(x), skipped(x))


def test_masks_of_a_segmenting_model() -> None:
    """SAM's positions are sines of 2 pi times a matmul of two coordinates."""
    from transformers import SamConfig, SamModel

    torch.manual_seed(0)
    d = 32
    vision = {"hidden_size": d, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 64,
              "mlp_dim": 64, "output_channels": d, "window_size": 2, "num_pos_feats": d // 2,
              "global_attn_indexes": [0]}  # fmt: skip
    prompts = {"hidden_size": d, "image_size": 64, "mask_input_channels": 8}
    masks = {"hidden_size": d, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_dim": 64,
             "iou_head_hidden_dim": d}  # fmt: skip
    config = SamConfig(
        vision_config=vision, prompt_encoder_config=prompts, mask_decoder_config=masks
    )
    model = SamModel(config).eval()
    inputs = {
        "pixel_values": torch.randn(1, 3, 64, 64),
        "input_points": torch.rand(1, 1, 3, 2) * 64,
    }
    with torch.no_grad():
        expected = model(**inputs).pred_masks
        found = torch.compile(model, backend="qfx", options=ALL)(**inputs).pred_masks
    assert sqnr(expected, found) > SQNR_BAR  # 12.6 dB with these matmuls in int8
