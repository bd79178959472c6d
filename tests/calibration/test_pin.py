"""A pinned plan: machines that would decide differently compute the same numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qfx
from qfx.cost.device_models import costs_from
from qfx.cost.model import Costs, Estimate, Work
from tests.conftest import same_bits
from tests.lib.costs import Free, Prices

ASYMMETRIC = qfx.Scheme(x=qfx.QSpec(symmetric=False))


class Net(nn.Module):
    """Linears, a product of two activations and an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = (h @ h.mT) @ x
        heads = self.b(y).unflatten(-1, (4, 16)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads)


@dataclass(frozen=True)
class OneSide(Free):
    """A machine on which int8 gains for linears alone, or for all else alone."""

    linears: bool

    def estimate(self, work: Work) -> Estimate:
        gains = (work.scheme is not None) == self.linears and work.kind != "decodes"
        return Estimate(4.0 if gains else 0.25, 1.0)


MACHINES = [Prices(4.0), Prices(0.25), OneSide(True), OneSide(False)]
X = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0))


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def run(model: nn.Module, cost: Any, recipe: qfx.Recipe | None = None) -> Tensor:
    torch._dynamo.reset()
    with costs_from(Costs(cost)), torch.no_grad():
        options = {"inner": "eager", **({"recipe": recipe} if recipe else {})}
        return torch.compile(model, backend="qfx", options=options)(X)  # type: ignore[no-any-return]


def schemes(model: nn.Module, cost: Any, recipe: qfx.Recipe | None = None) -> list[str]:
    with costs_from(Costs(cost)):
        options = {"recipe": recipe} if recipe else {}
        return [row.scheme for row in qfx.explain(model, X, options=options).rows]


@pytest.mark.parametrize("here", MACHINES, ids=str)
def test_a_pinned_plan_is_followed_on_every_machine(here: Any, tmp_path: Path) -> None:
    model = net()
    with costs_from(Costs(here)):
        qfx.pin(model, X).save(tmp_path / "plan.json")
    recipe = qfx.Recipe.load(tmp_path / "plan.json")
    expected, decided = run(model, here), schemes(model, here)
    others = [there for there in MACHINES if there != here]
    assert all(schemes(model, there, recipe) == decided for there in others)
    assert all(same_bits(run(model, there, recipe), expected) for there in others)
    assert not any(same_bits(run(model, there), expected) for there in others)


def test_a_pinned_plan_is_a_value_and_prints() -> None:
    with costs_from(Costs(MACHINES[0])):
        recipe = qfx.pin(net(), X)
    assert recipe.pinned and {s.name for s in recipe.sites} == {"a", "b"}
    assert qfx.Recipe.from_json(recipe.to_json()) == recipe
    assert str(recipe).count("of two activations") == len(recipe.pinned) == 3


def test_what_a_pinned_plan_does_not_name_stays_float() -> None:
    sites = (qfx.SiteRecipe("a", 0, 64, 64, ASYMMETRIC),)
    tokens = schemes(net(), MACHINES[0], qfx.Recipe(sites, ()))
    assert tokens == [str(ASYMMETRIC), "float", "float", "float", "float"]
    assert "float" not in schemes(net(), MACHINES[0], qfx.Recipe(sites))  # is not pinned


def test_modules_follow_a_pinned_plan() -> None:
    sites = (qfx.SiteRecipe("a", 0, 64, 64, ASYMMETRIC),)
    model = net()
    qfx.quantize_(model, qfx.Config(recipe=qfx.Recipe(sites, ())))
    assert isinstance(model.a, qfx.nn.Linear) and type(model.b) is nn.Linear


class Layers(nn.Module):
    """Two that are alike, compiled apart because of a graph break, which share Dynamo's code."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Products(), Products()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = layer(x)
        return x


def test_layers_without_weights_are_pinned_apart() -> None:
    model = Layers()
    with costs_from(Costs(MACHINES[0])):
        whole = qfx.pin(model, X)
    assert whole.pinned and len(whole.pinned) == 4
    first = qfx.Recipe((), tuple(p for p in whole.pinned if p.name == "layers.0"))
    with torch.no_grad():
        expected = model.layers[1](run(model.layers[0], MACHINES[0]))
    assert same_bits(run(model, MACHINES[0], first), expected)


class Decoder(nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k)


def test_how_one_query_is_answered_is_pinned() -> None:
    q, k = torch.randn(1, 2, 1, 64), torch.randn(1, 2, 9, 64)

    class Decodes(Prices):
        def estimate(self, work: Work) -> Estimate:
            return Estimate(2.0, 1.0) if work.kind == "decodes" else Estimate(1.0, 9.0)

    with costs_from(Costs(Decodes(1.0))):
        recipe = qfx.pin(Decoder(), q, k)
    assert recipe.pinned == (qfx.PinnedProduct(recipe.pinned[0].name, 0, decodes=True),)
    config = qfx.Config(recipe=qfx.Recipe.from_json(recipe.to_json()))
    gm, plan = qfx.rewrite(qfx.trace(Decoder(), q, k), config)
    assert [e.decodes for e in plan.entries] == [True] and "attention_decode" in gm.code
    several = torch.randn(1, 2, 3, 64)
    _, plan = qfx.rewrite(qfx.trace(Decoder(), several, k), config)
    assert "serves one query" in plan.entries[0].reason


class Products(nn.Module):
    """Two of one name: what a module multiplies itself has the module's."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT) @ x


def test_products_of_one_name_are_pinned_apart() -> None:
    model = nn.Sequential(Products())
    with costs_from(Costs(MACHINES[0])):
        both = qfx.pin(model, X)
    assert both.pinned and [(p.name, p.call) for p in both.pinned] == [("0", 0), ("0", 1)]
    second = qfx.Recipe((), both.pinned[1:])
    assert schemes(model, MACHINES[0], second) == ["float", str(both.pinned[1].scheme)]


class Twice(nn.Module):
    """One linear in two graphs, of many rows and of one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        torch._dynamo.graph_break()
        return self.a(y[:1])


class ManyRows(Free):
    """A machine on which int8 gains from 4 rows on."""

    def estimate(self, work: Work) -> Estimate:
        return Estimate(4.0 if work.m >= 4 else 0.25, 1.0)


def test_a_matmul_that_two_graphs_decide_differently_is_told() -> None:
    model = Twice().eval()
    with (
        costs_from(Costs(ManyRows())),
        pytest.raises(ValueError, match=r"pin: a is xa8\S+ in one graph and float in another; pin"),
    ):
        qfx.pin(model, torch.randn(8, 64))
    with costs_from(Costs(Prices(4.0))):  # both int8: one site
        assert len(qfx.pin(model, torch.randn(8, 64)).sites) == 1


def test_a_model_without_a_graph_is_told() -> None:
    with pytest.raises(ValueError, match="pin: no graph was captured"):
        qfx.pin(torch.compiler.disable(lambda x: x), X)


def test_a_recipe_among_the_options_is_taken_over() -> None:
    """Its numbers too."""
    factor = tuple(1.0 + i % 2 for i in range(64))
    given = qfx.SiteRecipe("a", 0, 64, 64, ASYMMETRIC, factor=factor)
    with costs_from(Costs(MACHINES[1])):
        found = qfx.pin(net(), X, options={"recipe": qfx.Recipe((given,))})
    assert found.sites[0] == given and found.sites[1].scheme is None


@pytest.mark.parametrize(
    ("make", "phrase"),
    [
        (lambda: qfx.PinnedProduct("m", -1), "call=-1, scheme=None, .*; expected"),
        (lambda: qfx.PinnedProduct("m", 0, "int8"), "scheme='int8', .*; expected"),  # type: ignore[arg-type]
        (
            lambda: qfx.PinnedProduct("m", 0, qfx.Scheme(), True),
            "it computes in float: leave scheme=None, not",
        ),
        (
            lambda: qfx.PinnedProduct("m", 0, qfx.Scheme(x=None)),
            "cannot quantize a product of two activations",
        ),
        (
            lambda: qfx.Recipe((), (qfx.PinnedProduct("m", 1),) * 2),
            r"more than one entry for m\[1\]",
        ),
        (
            lambda: qfx.Recipe.from_json('{"qfx_recipe": 1, "sites": [], "pinned": {}}'),
            "has an entry that cannot be read",
        ),
    ],
)
def test_pins_that_are_none(make: Any, phrase: str) -> None:
    with pytest.raises(ValueError, match=phrase):
        make()
