"""Training: optimizers between steps, layers frozen and thawed, adapters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from qfx.weights.cache import CACHE
from tests.lib.models import compiled
from tests.lib.training import BATCH, Language, Two, X, loss_of, near, new, of_x_too, same


def _foreach(parameters: Any) -> AdamW:
    return AdamW(parameters, lr=0.02, foreach=True)


# name -> (optimizer, whether its step is compiled)
OPTIMIZERS: dict[str, tuple[Callable[[Any], Optimizer], bool]] = {
    "sgd": (lambda p: SGD(p, lr=0.05), False),
    "adamw foreach": (_foreach, False),
    "adamw fused": (lambda p: AdamW(p, lr=0.02, fused=True), False),
    "adamw compiled": (_foreach, True),
    "sgd compiled": (lambda p: SGD(p, lr=0.05, foreach=True), True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_inference_after_each_step_sees_the_new_weights(name: str) -> None:
    """The same bits as a copy that was never trained or packed before."""
    make, compiles = OPTIMIZERS[name]
    model = new(Language)
    f, optimizer = compiled(model, inner="aot_eager"), make(model.parameters())
    step = torch.compile(optimizer.step, backend="aot_eager") if compiles else optimizer.step
    losses, seen = [], []
    for _ in range(3):
        loss = loss_of(f)
        loss.backward()
        step()
        optimizer.zero_grad()
        losses.append(loss.item())
        with torch.no_grad():
            seen.append(f(BATCH))
            assert seen[-1].equal(compiled(copy.deepcopy(model))(BATCH))
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]
    assert not seen[0].equal(seen[1])


def test_steps_through_data_are_seen_as_nothing_is_packed_between_them() -> None:
    """Weights that train are packed in the graph."""
    model, before = new(Two), CACHE.packs
    f = compiled(model, inner="aot_eager")
    for _ in range(3):
        found, twin = of_x_too(f, model), copy.deepcopy(model)
        assert same(found, of_x_too(compiled(twin), twin))
        assert CACHE.packs == before
        for name, parameter in model.named_parameters():
            parameter.data -= 0.5 * found[name]


def test_layers_frozen_and_thawed_between_steps() -> None:
    """One compiled function through all of it has the gradients of fresh ones."""
    model = new(Two)
    f = compiled(model, inner="aot_eager")
    for frozen in ("", "a", "b.weight", ""):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not frozen or not name.startswith(frozen))
        found = of_x_too(f, model)
        assert near(of_x_too(model, model), found)
        assert same(found, of_x_too(compiled(model), model))


class Adapted(nn.Module):
    """A frozen linear with a trained update of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("optimized", ["adapters", "all"])
def test_the_frozen_base_of_adapters_is_packed_once(optimized: str) -> None:
    """Also when the optimizer was given all parameters: without a gradient it changes none, and
    no step makes the cache compare contents."""
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(), nn.GELU(), Adapted())
    f, losses = compiled(model, inner="aot_eager"), []
    packs, generation = CACHE.packs, CACHE.generation
    parameters = [p for p in model.parameters() if p.requires_grad or optimized == "all"]
    optimizer = AdamW(parameters, lr=0.02)
    for _ in range(4):
        optimizer.zero_grad()
        loss = f(X).sub(1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert (CACHE.packs, CACHE.generation) == (packs + 2, generation)
