"""Layers that Dynamo would run with what it compiled for one of them: patterns, recipes, guards and
`explain` mean each by its own name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qfx
from qfx.values.recipe import Recipe
from qfx.values.scheme import Scheme
from qfx.values.site_recipe import SiteRecipe
from tests.fuzz.checking import counting
from tests.lib.models import compiled
from tests.match.test_names import ALL, K, X, in_turn, int8, linear, weight


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = linear()

    def forward(this, x: Tensor) -> Tensor:
        return F.relu(this.fc(x))


class Loop(nn.Module):
    """A graph break makes each layer a frame of its own."""

    def __init__(self, layers: int, make: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = layer(x)
        return x


def one_linear() -> nn.Module:
    return nn.Sequential(linear())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"skip": ["layers.1"]}, 2), ({"skip": ["layers.[02]"]}, 1), ({"only": ["layers.1"]}, 1),
        ({"only": ["layers.0"]}, 1),
    ],
)  # fmt: skip
def test_patterns_reach_the_layers_they_name(options: Any, expected: int) -> None:
    model = Loop(3)
    assert int8(model, X, **options) == expected
    assert qfx.explain(model, X, options={**ALL, **options}).quantized == expected


def test_what_is_decided_alike_is_compiled_once() -> None:
    counters = torch._dynamo.utils.counters
    counters.clear()
    assert int8(Loop(3), X, skip=["bias"]) == 3
    assert counters["stats"]["unique_graphs"] == 1


def test_more_layers_than_dynamo_recompiles() -> None:
    limit = torch._dynamo.config.recompile_limit
    assert int8(Loop(limit + 2), X, skip=["layers.0"]) == limit + 1


@pytest.mark.parametrize("make", [Layer, linear, one_linear])
def test_layers_compiled_one_by_one_have_their_names_in_the_model(make: Any) -> None:
    model = Loop(3, make)
    for i, layer in enumerate(model.layers):
        model.layers[i] = compiled(layer, skip=["layers.1"])
    with torch.no_grad():
        model(X)
        assert counting(model, [X])[1].linear == 2


def test_layers_compiled_in_place_have_their_names_in_the_model() -> None:
    model = Loop(3)
    for layer in model.layers:
        layer.compile(backend=qfx.backend, options={**ALL, "inner": "eager", "skip": ["layers.1"]})
    with torch.no_grad():
        model(X)
        assert counting(model, [X])[1].linear == 2


class InTwo(nn.Module):
    """What it multiplies belongs to no module that it calls, and part of it follows a break."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = weight(), weight()

    def forward(this, x: Tensor) -> Tensor:
        y = x @ this.w
        torch._dynamo.graph_break()
        return y @ this.v @ y.mT @ y


def test_the_path_of_a_layer_that_is_a_frame_of_its_own() -> None:
    model = Loop(2, InTwo)
    report = qfx.explain(model, X, options=ALL)
    assert [row.module for row in report.rows] == ["layers.0"] * 4 + ["layers.1"] * 4
    skipped = qfx.explain(model, X, options={**ALL, "skip": ["layers.1"]})
    assert [row.reason for row in skipped.rows[4:]] == ["skipped by the pattern 'layers.1'"] * 4


def test_guards_of_layers_count_each_by_its_name() -> None:
    names = [f"layers.{i}.fc" for i in range(3)]
    before = qfx.guard_counts()
    assert int8(Loop(3), X, guard=0.5) == 0  # by another operator
    after = qfx.guard_counts()
    none = qfx.GuardCount(0, 0, 0, 0)
    assert [after[n].rows - before.get(n, none).rows for n in names] == [2 * len(X)] * 3


def function_of_a_layer(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


class ByFunction(Loop):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = function_of_a_layer(layer, x)
        return x


def test_layers_that_a_function_is_given_have_their_names() -> None:
    model = ByFunction(3)
    report = qfx.explain(model, X, options=ALL)
    assert [row.module for row in report.rows] == [f"layers.{i}.fc" for i in range(3)]
    assert int8(model, X, skip=["layers.1"]) == 2


class ByList(Loop):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = in_turn([layer], x)
        return x


def times(w: nn.Parameter, x: Tensor) -> Tensor:
    return x @ w


class ByWeight(Loop):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = times(layer.fc.weight, x)
        return x


@pytest.mark.parametrize("model", [ByList(3), ByWeight(3)])
@pytest.mark.parametrize("pattern", ["layers.0", "layers.1"])
def test_layers_that_a_function_is_given_in_parts(model: nn.Module, pattern: str) -> None:
    assert int8(model, X, skip=[pattern]) == 2
    assert int8(model, X, only=[pattern]) == 1


def test_layers_in_a_list_have_their_names() -> None:
    rows = qfx.explain(ByList(3), X, options={**ALL, "skip": ["layers.1"]}).rows
    assert [row.module for row in rows] == [f"layers.{i}.fc" for i in range(3)]
    assert [row.module for row in rows if row.scheme == "float"] == ["layers.1.fc"]


# --- recipes ---


def _static(name: str, scale: float) -> SiteRecipe:
    scheme = Scheme(x=qfx.QSpec(axes=(0, 1), static=True))
    return SiteRecipe(name, 0, K, K, scheme, None, scale)


def test_each_layer_has_the_numbers_of_its_own_recipe() -> None:
    model = Loop(3)
    scales = [0.01, 0.03, 0.02]
    sites = [_static(f"layers.{i}.fc", scale) for i, scale in enumerate(scales)]
    f = compiled(model, recipe=Recipe(tuple(sites)))
    with torch.no_grad():
        y = X
        for layer, scale in zip(model.layers, scales, strict=True):
            alone = Recipe((_static("fc", scale),))
            y = qfx.rewrite(qfx.trace(layer, X), qfx.Config(recipe=alone))[0](y)
        assert torch.equal(f(X), y)


class Outer(nn.Module):
    """Runs a model that was calibrated by itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.head, self.model = linear(), model

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.model(x))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_recipe_serves_its_model_inside_another(in_place: bool) -> None:
    inner, recipe = Layer(), Recipe((_static("fc", 0.02),))
    alone = qfx.rewrite(qfx.trace(inner, X), qfx.Config(recipe=recipe))[0]
    if in_place:
        inner.compile(backend=qfx.backend, options={"recipe": recipe, "inner": "eager"})
    model = Outer(inner if in_place else compiled(inner, recipe=recipe))
    with torch.no_grad():
        assert torch.equal(model(X), model.head(alone(X)))
