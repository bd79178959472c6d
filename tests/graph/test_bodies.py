"""Matmuls in the bodies of higher-order operators are int8 too, their weights packed outside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._higher_order_ops.invoke_subgraph import mark_compile_region
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch.utils.checkpoint import checkpoint

import qfx
from qfx.graph.capture import graphs
from qfx.match.matching import match
from qfx.ops.single_tensors import sqnr
from qfx.plan.policy import decide
from qfx.weights.cache import CACHE
from tests.lib.models import compiled
from tests.lib.pairs import every
from tests.lib.versions import trains_scans


class _Two(nn.Module):
    """Two linears and, in the subclasses, a way to run them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)


class Checkpointed(_Two):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: self.b(self.a(x).sigmoid()), x, use_reentrant=False)


class NestedCheckpoint(_Two):
    def forward(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return checkpoint(self.a, x, use_reentrant=False)

        return checkpoint(lambda x: self.b(inner(x)), x, use_reentrant=False)


class Branches(_Two):
    """Both branches use a's weight, one of them transposed."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, self.a, lambda x: self.b(x) @ self.a.weight, (x,))


class Scanned(_Two):
    def forward(self, x: Tensor) -> Tensor:
        def step(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            carry = torch.tanh(self.a(carry) + self.b(x))
            return carry, carry.clone()

        return scan(step, x[0], x, dim=0)[1]


class Looped(_Two):
    def forward(self, x: Tensor) -> Tensor:
        def body(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return i + 1, self.b(self.a(x))

        start = (torch.tensor(0), x)
        return torch._higher_order_ops.while_loop(lambda i, x: i < 3, body, start)[1]


class Mapped(_Two):
    def forward(self, x: Tensor) -> Tensor:
        return torch_map(lambda x: self.b(self.a(x)), x)


@mark_compile_region
def _region(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(F.linear(x, w, b))


class Regions(_Two):
    """One body, called for each layer with its own weight."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b):
            x = _region(x, layer.weight, layer.bias)
        return x


@mark_compile_region
def _remembering(x: Tensor, w: Tensor, b: Tensor, seen: Tensor) -> Tensor:
    y = torch.tanh(F.linear(x, w, b))
    seen.copy_(y)
    return y


class Remembering(_Two):
    """A body that writes, as a decoder's layer does to its cache, and not to its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = [torch.zeros(4, 8), torch.zeros(4, 8)]

    def forward(self, x: Tensor) -> Tensor:
        for layer, seen in zip((self.a, self.b), self.seen, strict=True):
            x = _remembering(x, layer.weight, layer.bias, seen)
        return x


# model -> matmuls in its bodies, packed weights
MODELS: dict[type[_Two], tuple[int, int]] = {
    Checkpointed: (2, 2),
    NestedCheckpoint: (2, 2),
    Branches: (3, 3),
    Scanned: (2, 2),
    Looped: (2, 2),
    Mapped: (2, 2),
    Regions: (1, 2),
    Remembering: (1, 2),
}
UNTRAINED = (Looped, Scanned, Remembering)  # a while_loop has no gradient
TRAINABLE: list[Any] = [m for m in MODELS if m not in UNTRAINED]
TRAINABLE.append(pytest.param(Scanned, marks=trains_scans))
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def _model(kind: type[_Two]) -> _Two:
    torch.manual_seed(0)
    return kind()


@pytest.mark.parametrize("kind, inner", every(MODELS, ["eager", "inductor"]))
def test_inference(kind: type[_Two], inner: str) -> None:
    """Int8 with weights from the cache, packed once, noticed when they change."""
    model, before = _model(kind), CACHE.packs
    f = compiled(model, inner=inner, fullgraph=True)  # torch's scan needs it under Inductor
    with torch.no_grad():
        for _ in range(2):
            assert 25 < sqnr(model(X), f(X)) < 80
        assert CACHE.packs == before + MODELS[kind][1]
        model.b.weight.mul_(3)
        assert 25 < sqnr(model(X), f(X)) < 80


def test_what_a_body_writes_is_written() -> None:
    model, twin = _model(Remembering), _model(Remembering)
    with torch.no_grad():
        compiled(model)(X), twin(X)
    assert all(25 < sqnr(t, s) < 80 for t, s in zip(twin.seen, model.seen, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", MODELS)
def test_explain(kind: type[_Two]) -> None:
    with torch.no_grad():
        report = qfx.explain(_model(kind), X, options={"minimum_gain": 0})
    assert (report.quantized, report.total) == (MODELS[kind][0],) * 2


def _gradients(f: Any, model: nn.Module) -> Tensor:
    model.zero_grad()
    f(X).square().sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("kind", TRAINABLE)
def test_training(kind: type[_Two]) -> None:
    """Gradients reach every parameter that they reach in float."""
    model = _model(kind)
    f = compiled(model, inner="aot_eager")
    expected, found = _gradients(model, model), _gradients(f, model)
    assert 25 < sqnr(expected, found) < 80


class Layers(nn.Module):
    """Layers that one body serves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = _layer(layer, x)
        return x


@mark_compile_region
def _layer(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.tanh(layer(x))


ALL = {"minimum_gain": 0}


@pytest.mark.parametrize(
    ("options", "quantized"),
    [
        ({}, 1),
        ({"skip": ["layers.1"]}, 0),
        ({"only": ["layers.0"]}, 0),
        ({"only": ["layers.*"]}, 1),
    ],
)
def test_layers_of_one_body_that_patterns_tell_apart_stay_float(
    options: Any, quantized: int
) -> None:
    report = qfx.explain(Layers(), X, options={**ALL, **options})
    assert (report.quantized, report.total) == (quantized, 1)
    if not quantized:
        assert "the layers share one compiled graph" in report.rows[0].reason
        assert "treats layers.1" in report.rows[0].reason


def test_a_recipe_serves_layers_of_one_body_that_it_treats_alike() -> None:
    recipe = qfx.pin(Layers(), X, options=ALL)
    assert [site.name for site in recipe.sites] == ["layers.0", "layers.1"]
    assert qfx.explain(Layers(), X, options={"recipe": recipe}).quantized == 1
    first, second = recipe.sites
    apart = replace(recipe, sites=(first, replace(second, scheme=None)))
    assert qfx.explain(Layers(), X, options={"recipe": apart}).quantized == 0


def test_a_body_that_writes_its_weight_keeps_it_float() -> None:
    class Writes(_Two):
        def forward(self, x: Tensor) -> Tensor:
            self.a.weight.mul_(1.5)
            return checkpoint(self.a, x, use_reentrant=False)

    model, twin = _model(Writes), _model(Writes)
    with torch.no_grad():
        y = compiled(model)(X)
        assert torch.equal(y, twin(X)) and torch.equal(model.a.weight, twin.a.weight)


def test_a_body_that_once_gets_a_computed_weight_stays_float() -> None:
    """Both calls run one graph, in which the weight of the first is no constant."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w", torch.randn(8, 8))
            self.register_buffer("b", torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            return _region(_region(x, self.w, self.b), x.t() @ x, self.b)

    model, x = Mixed(), torch.randn(8, 8)
    with torch.no_grad():
        assert torch.equal(compiled(model)(x), model(x))


@pytest.mark.parametrize("kind", MODELS)
def test_the_bodies_of_the_given_graph_are_not_edited(kind: type[_Two]) -> None:
    printed: list[list[str]] = []

    def look(gm: fx.GraphModule, inputs: Any) -> Any:
        for _ in range(2):
            printed.append([str(graph) for graph in graphs(gm)])
            qfx.rewrite(gm, qfx.Config(minimum_gain=0))
        return gm.forward

    with torch.no_grad():
        torch.compile(_model(kind), backend=look, fullgraph=True)(X)
    before, after = printed
    assert len(before) > 1 and before == after


def test_bodies_of_other_operators_stay_float_with_the_operators_name() -> None:
    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x @ w.t()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
            x, w = ctx.saved_tensors
            return grads[0] @ w, grads[0].t() @ x

    class Calls(_Two):
        def forward(self, x: Tensor) -> Tensor:
            return Custom.apply(x, self.a.weight)

    plans: list[Any] = []

    def look(gm: fx.GraphModule, inputs: Any) -> Any:
        plans.append(decide(match(gm), qfx.Config(minimum_gain=0), None))
        return gm.forward

    torch.compile(_model(Calls), backend=look)(X)
    (plan,) = plans
    assert plan.quantized == 0 and plan.total == 3
    assert all("autograd_function_apply, whose bodies" in entry.reason for entry in plan.entries)
