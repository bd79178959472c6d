"""Experts of vLLM, with the classes of fake_vllm.py in the place of vLLM's: as qfx.nn.Experts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from qfx.nn.stacked_weight import StackedWeight
from qfx.ops.experts import gated
from qfx.values.config import Config
from qfx.vllm.plugin import register
from tests.vllm import fake_vllm as fake

E, K, WIDTH, T = 4, 64, 96, 7
NAME = "model.layers.0.mlp.experts"


@pytest.fixture(autouse=True)
def quantization(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with fake.installed():
        register()
        module = import_module("qfx.vllm.quantization")
        monkeypatch.setattr(module, "_version_of", lambda name: "0.32.0")
        yield fake.CONFIGS["qfx"]


def block(found: Any, activation: str = "silu", bias: bool = False) -> Any:
    """Returns a block of experts without its weights."""
    made = fake.RoutedExperts(activation, bias)
    method = found.get_quant_method(made, NAME)
    assert method is not None
    made.create(method, E, WIDTH, K)
    return made


def weights(bias: bool = False, rows: int = 2 * WIDTH) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"w13_weight": (E, rows, K), "w2_weight": (E, K, WIDTH)}
    if bias:
        shapes |= {"w13_bias": (E, rows), "w2_bias": (E, K)}
    return {name: torch.randn(shape, generator=g) / 8 for name, shape in shapes.items()}


def tokens() -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    routing = torch.rand(T, 2, generator=g)
    ids = torch.stack([torch.randperm(E, generator=g)[:2] for _ in range(T)])
    return torch.randn(T, K, generator=g), routing, ids.to(torch.int32)


def expected(x: Tensor, routing: Tensor, ids: Tensor, w: dict[str, Tensor], gate: Any) -> Tensor:
    """Computes slot by slot, in float."""
    y = torch.zeros(T, K)
    for t, s in ((t, s) for t in range(T) for s in range(ids.shape[1]) if 0 <= ids[t, s] < E):
        e = ids[t, s]
        u = x[t : t + 1] @ w["w13_weight"][e].T + w.get("w13_bias", torch.zeros(E, 1))[e]
        h = gated(u, *gate)
        out = h @ w["w2_weight"][e].T + w.get("w2_bias", torch.zeros(E, 1))[e]
        y[t] += routing[t, s] * out[0]
    return y


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("activation", "gate"),
    [
        ("silu", ("silu", "halves", 0, 0)),
        ("gelu_tanh", ("gelu_tanh", "halves", 0, 0)),
    ],
)
def test_a_block_computes_what_its_experts_do(
    quantization: Any, activation: str, gate: Any, bias: bool
) -> None:
    """The error of int8 is near 40 dB below the outputs."""
    made, w, given = block(quantization(), activation, bias), weights(bias), tokens()
    assert made.w13_weight.is_meta and [made] == fake.WAITING
    made.load(**w)
    wanted = expected(*given, w, gate)
    got = made(*given)
    assert (got - wanted).norm() <= 0.03 * wanted.norm()
    assert made.w13_weight.dtype == torch.int8 and made.w2_weight.shape[0] == E
    assert {*made.state_dict()} == {*w}


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-groups", "w4a8"])
def test_the_weights_are_those_of_qfx(quantization: Any, scheme: str) -> None:
    """With the same bits, also after they were loaded anew."""
    made, w = block(quantization.from_config({"scheme": scheme})), weights()
    for each in (w, {name: t.flip(0) for name, t in w.items()}):
        made.load(**each)
        for name, t in each.items():
            wanted = StackedWeight.from_float(t, Config(scheme=scheme).chosen)
            assert torch.equal(getattr(made, name), wanted.packed)


def test_experts_of_other_ranks_add_nothing(quantization: Any) -> None:
    """A map gives the place of each expert of the model here, and -1 for those elsewhere."""
    made, w, (x, routing, ids) = block(quantization()), weights(), tokens()
    made.load(**w)
    made.expert_map = torch.tensor([-1, 0, -1, 1, 2, 3, -1], dtype=torch.int32)
    local = made.expert_map[ids.long()]
    wanted = expected(x, routing, local, w, ("silu", "halves", 0, 0))
    assert (made(x, routing, ids) - wanted).norm() <= 0.03 * wanted.norm()


def test_routing_weights_may_multiply_the_input(quantization: Any) -> None:
    made, w, (x, routing, ids) = block(quantization()), weights(), tokens()
    made.load(**w)
    made.apply_router_weight_on_input = True
    routing, ids = routing[:, :1], ids[:, :1]
    ones = torch.ones_like(routing)
    wanted = expected(x * routing, ones, ids, w, ("silu", "halves", 0, 0))
    assert (made(x, routing, ids) - wanted).norm() <= 0.03 * wanted.norm()


def test_weights_that_cannot_be_quantized_stay_float(
    quantization: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made, w = block(quantization()), weights()
    w["w2_weight"][3, 4, 5] = float("nan")
    made.load(**w)
    assert f"qfx: {NAME} stays float: its weight holds NaN or infinity" in caplog.text
    assert isinstance(made.quant_method, fake.UnquantizedFusedMoEMethod)
    assert made.quant_method.processed[0] is made and torch.equal(made.w13_weight, w["w13_weight"])


@pytest.mark.parametrize(
    ("options", "activation", "reason"),
    [
        ({"skip": ["experts"]}, "silu", "skipped by the pattern"),
        ({}, "situ", "their activation situ is not one of the operator"),
        ({"scheme": "w4"}, "silu", "has float activations, and experts have no operator"),
    ],
    ids=str,
)
def test_why_experts_are_left_to_vllm(
    quantization: Any,
    options: Any,
    activation: str,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        found = quantization.from_config(options)
        assert found.get_quant_method(fake.RoutedExperts(activation), NAME) is None
    assert f"qfx: {NAME} stays float: " in caplog.text and reason in caplog.text


def test_experts_that_load_in_a_way_of_their_own_are_left_to_vllm(
    quantization: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As those of GPT-OSS do, whose float weights would never be read."""
    kind = type("OtherExperts", (fake.RoutedExperts,), {})
    with caplog.at_level(logging.INFO):
        assert quantization().get_quant_method(kind(), NAME) is None
    assert "OtherExperts loads its weights in a way of its own" in caplog.text


def test_a_limit_of_the_gate_leaves_experts_to_vllm(quantization: Any) -> None:
    layer: Any = fake.RoutedExperts()
    layer.swiglu_limit = 7.0
    assert quantization().get_quant_method(layer, NAME) is None
