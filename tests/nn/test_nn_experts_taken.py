"""Which blocks of experts become int8, and why others stay float."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

import qfx
from qfx.nn import Experts
from qfx.nn.experts_like import gate_of
from qfx.ops.expert_gates import ExpertGate
from tests.lib.experts_blocks import (
    E,
    H,
    block_of,
    model_of,
    routed,
)


def _gate(block: Any, gate: Callable[[Tensor], Tensor]) -> None:
    block.__class__ = type("Other", (type(block),), {"_apply_gate": lambda self, u: gate(u)})


def _clipped(u: Tensor) -> Tensor:
    a, b = u.chunk(2, -1)
    return torch.nn.functional.silu(a).clamp(max=7) * b


GATES: dict[str, ExpertGate] = {
    "mixtral": ExpertGate("silu", "halves"),
    "gpt-oss": ExpertGate("quick_gelu", "interleaved", 7.0, 1.0),
    "granite": ExpertGate("silu", "halves"),
}


@pytest.mark.parametrize("name", GATES)
def test_a_gate_is_known_by_what_it_computes(name: str) -> None:
    assert gate_of(block_of(name)) == GATES[name]


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_pytorch_tanh", "quick_gelu"])
def test_an_activation_is_known_by_what_it_computes(activation: str) -> None:
    """In a gate, and alone."""
    block = block_of("mixtral")
    block.act_fn = ACT2FN[activation]
    name = {"gelu_pytorch_tanh": "gelu_tanh"}.get(activation, activation)
    assert gate_of(block) == ExpertGate(name, "halves")
    block.has_gate = False
    assert gate_of(block) == ExpertGate(name, "none")


REFUSED: dict[str, Callable[[Any], Any]] = {
    "has a norm after each expert": lambda b: setattr(b, "has_post_expert_norm", True),
    "has only some of the experts": lambda b: setattr(b, "_is_expert_parallel", True),
    "a gate or an activation that the operator": lambda b: setattr(b, "act_fn", ACT2FN["relu2"]),
    "has a gate or an activation": lambda b: _gate(b, _clipped),
    "the gate of Other could not be tried": lambda b: _gate(b, lambda u: u.no_such_thing),
    "has a parameter scales": lambda b: setattr(b, "scales", nn.Parameter(torch.ones(E))),
    "not the attributes that say": lambda b: delattr(b, "has_gate"),
    "its weight is float64": lambda b: b.double(),
    "do not fit each other": lambda b: setattr(b, "has_gate", False),
    "holds NaN or infinity": lambda b: b.down_proj.data[2, 3, 4].fill_(torch.nan),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_block_that_stays_float_says_why_and_how_much_it_is(why: str) -> None:
    """quantize_ warns, and from_float raises."""
    model: Any = nn.ModuleDict({"experts": block_of("mixtral"), "head": nn.Linear(H, H)})
    block = model["experts"]
    REFUSED[why](block)
    count = block.gate_up_proj.numel() + block.down_proj.numel()
    with pytest.raises(ValueError, match=why):
        Experts.from_float(block)
    with pytest.warns(UserWarning, match=rf"experts \(.*{why}.*; it has {count:,} weights\)"):
        qfx.quantize_(model)
    assert model["experts"] is block
    assert isinstance(model["head"], qfx.nn.Linear)


@pytest.mark.parametrize("scheme", ["w8", "w4", "w8a8-tensor"])
def test_schemes_that_are_not_for_experts(scheme: str) -> None:
    model = model_of("mixtral")
    with pytest.warns(UserWarning, match="experts.*weights"):
        qfx.quantize_(model, scheme)
    assert not any(isinstance(m, Experts) for m in model.modules())


class LinearRouter(nn.Module):
    """A block whose router is an nn.Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(H, E, bias=False), block_of("mixtral")
        self.gate_proj = nn.Linear(H, E)


def test_a_linear_that_chooses_experts_stays_float(caplog: pytest.LogCaptureFixture) -> None:
    """Unless the experts stay float, as always."""
    model = nn.ModuleDict({"mlp": LinearRouter()})
    with caplog.at_level(logging.INFO, "qfx"):
        qfx.quantize_(model)
    assert type(model["mlp"].gate) is nn.Linear
    assert isinstance(model["mlp"].gate_proj, qfx.nn.Linear)
    assert "it chooses among the experts of mlp.experts" in caplog.text
    other = nn.ModuleDict({"mlp": LinearRouter()})
    qfx.quantize_(other, qfx.Config(skip=["experts"]))
    assert isinstance(other["mlp"].gate, qfx.nn.Linear)


def test_patterns_name_blocks() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = qfx.quantize_(model_of("olmoe"), qfx.Config(skip=["layers.0.mlp.experts"]))
        other = qfx.quantize_(model_of("olmoe"), qfx.Config(only=["layers.0.mlp.experts"]))
    assert [isinstance(m.mlp.experts, Experts) for m in first.model.layers] == [False, True]
    assert [isinstance(m.mlp.experts, Experts) for m in other.model.layers] == [True, False]
    assert type(other.lm_head) is nn.Linear


def test_modules_of_torchscript_beside_experts_stay() -> None:
    scripted = torch.jit.script(nn.Linear(H, E))
    model = qfx.quantize_(nn.ModuleDict({"router": scripted, "experts": block_of("mixtral")}))
    assert model["router"] is scripted
    assert isinstance(model["experts"], Experts)


def test_hooks_are_kept_and_another_forward_is_refused() -> None:
    model, seen = nn.ModuleDict({"experts": block_of("mixtral")}), []
    model["experts"].register_forward_hook(lambda *given: seen.append(given[0]))
    qfx.quantize_(model)
    with torch.no_grad():
        model["experts"](*routed())
    assert seen == [model["experts"]]
    other = nn.ModuleDict({"experts": block_of("mixtral")})
    vars(other["experts"])["forward"] = lambda *given: given[0]
    with pytest.raises(ValueError, match="its forward is its own, not that of MixtralExperts"):
        qfx.quantize_(other)
