"""How often int8 changes the experts that a router chooses, in models that run module by module and
in graphs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qfx
from qfx.nn.experts_like import is_experts
from qfx.report.html import page
from qfx.report.routing import RoutingChange, routing_changes, routing_text
from qfx.values.config import Config
from tests.lib.experts_blocks import IDS, model_of

SCHEME = "w4a8"
HOW: dict[str, Any] = {"minimum_gain": 0, "scheme": SCHEME, "smoothing": False}


@pytest.mark.parametrize(
    ("exact", "other", "changed"),
    [
        ([[0, 1], [2, 3]], [[0, 1], [2, 3]], 0),
        ([[0, 1], [2, 3]], [[1, 0], [3, 2]], 0),  # other slots, the same experts
        ([[0, 1], [2, 3]], [[0, 2], [2, 3]], 1),
        ([[0, 1], [2, 3]], [[2, 3], [0, 1]], 4),  # other tokens
    ],
)
def test_a_choice_changed_if_its_token_no_longer_goes_there(
    exact: list[list[int]], other: list[list[int]], changed: int
) -> None:
    a, b = torch.tensor(exact), torch.tensor(other)
    (found,) = routing_changes(["m"], {"m": [a, a]}, {"m": [b, a]})
    assert found == RoutingChange("m", changed, 8) and found.share == changed / 8


@pytest.mark.parametrize("other", [{}, {"m": []}, {"m": [torch.zeros(2, 3)]}])
def test_runs_that_cannot_be_compared_are_said(other: Any) -> None:
    found = routing_changes(["m"], {"m": [torch.zeros(2, 2)]}, other)
    assert found == (RoutingChange("m", 0, 0),) and routing_text(found).endswith(": m not compared")


def test_blocks_with_most_changes_come_first() -> None:
    text = routing_text([RoutingChange("a", 1, 10), RoutingChange("b", 2, 10)])
    assert text == (
        "routing: int8 changes 3 of 20 choices of experts (15.0%): b 2 of 10 (20.0%), "
        "a 1 of 10 (10.0%)"
    )
    assert routing_text(()) == ""


def choices_of(model: nn.Module) -> list[Tensor]:
    """Returns the choices for each block of a model that runs module by module."""
    blocks = [m for m in model.modules() if isinstance(m, qfx.nn.Experts) or is_experts(m)]
    found: list[Tensor] = []
    hooks = [b.register_forward_pre_hook(lambda _, args: found.append(args[1])) for b in blocks]
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        model(IDS)
    for hook in hooks:
        hook.remove()
    return found


def counted(in_float: Sequence[Tensor], in_int8: Sequence[Tensor]) -> list[int]:
    """Returns, for each block, how many experts of a token in one run it lacks in the other."""
    sets = [[[set(token) for token in t.tolist()] for t in each] for each in (in_float, in_int8)]
    return [sum(len(a - b) for a, b in zip(x, y, strict=True)) for x, y in zip(*sets, strict=True)]


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_a_quantized_model_against_its_reference(name: str) -> None:
    model = model_of(name)
    quantized = qfx.quantize_(copy.deepcopy(model), SCHEME)
    before = {key: value.clone() for key, value in quantized.state_dict().items()}
    expected = counted(choices_of(model), choices_of(quantized))
    report = qfx.explain(quantized, IDS, reference=model)
    assert [c.changed for c in report.whole.routing] == expected
    assert [c.choices for c in report.whole.routing] == [2 * IDS.numel()] * len(expected)
    assert report.whole.routing_text in str(report).splitlines()
    assert "routing: int8 changes" in page(report)
    assert all(not m._forward_pre_hooks for m in (*model.modules(), *quantized.modules()))
    after = quantized.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_without_a_reference_it_is_what_quantizing_activations_changes() -> None:
    """Weights that are the same on both sides cannot change a choice by themselves."""
    quantized = qfx.quantize_(model_of("qwen3-moe"), Config(scheme="w8", skip=["experts"]))
    report = qfx.explain(quantized, IDS)
    assert [c.changed for c in report.whole.routing] == [0, 0]


class Shown(nn.Module):
    """A model that also returns what its routers choose, so that its choices can be read from
    compiled code."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        kept = self.model(ids, output_router_logits=True)
        chosen = tuple(t.softmax(-1).topk(2).indices for t in kept.router_logits)
        return kept.logits, chosen


@pytest.mark.parametrize(("implementation", "layers"), [("grouped_mm", 2), ("eager", 1)])
def test_graphs_of_a_float_model(implementation: str, layers: int) -> None:
    """The float side is the captured graph, the int8 side is the graph as qfx rewrites it, also if
    it breaks at the experts."""
    model = model_of("qwen3-moe")
    model.set_experts_implementation(implementation)
    model.model.layers = model.model.layers[:layers]  # each takes long to capture where it breaks
    shown = Shown(model).eval()
    compiled = torch.compile(shown, backend="qfx", options={**HOW, "inner": "eager"})
    with torch.no_grad():
        expected = counted(shown(IDS)[1], compiled(IDS)[1])
    found = qfx.explain(shown, IDS, options=HOW).whole.routing
    assert [c.changed for c in found] == expected and sum(expected) > 0
    assert [c.name for c in found] == [f"model.model.layers.{i}.mlp.experts" for i in range(layers)]


def test_a_compiled_quantized_model() -> None:
    model = model_of("qwen3-moe")
    quantized = qfx.quantize_(copy.deepcopy(model), SCHEME)
    expected = counted(choices_of(model), choices_of(quantized))
    compiled = torch.compile(quantized, backend="qfx", options={"inner": "eager"})
    found = qfx.explain(compiled, IDS, reference=model).whole.routing
    assert [c.changed for c in found] == expected


def test_models_without_experts_say_nothing() -> None:
    model = nn.Sequential(nn.Linear(64, 64)).eval()
    report = qfx.explain(model, torch.randn(4, 64), options={"minimum_gain": 0})
    assert report.whole.routing == () and "routing" not in str(report)
