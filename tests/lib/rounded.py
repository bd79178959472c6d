"""A small model with codes found by GPTQ, for tests of how codes are applied."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import qfx
from qfx import Recipe
from tests.lib.models import compiled

K = 128
EVERY = qfx.Config(minimum_gain=0)


class Net(nn.Module):
    """Two linears with the same input, of odd sizes, followed by another one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(K, 33), nn.Linear(K, 33, bias=False), nn.Linear(33, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x).relu() * self.b(x))


def operands(n: int, k: int, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns a weight, and rows whose features are correlated and differ in power."""
    random = torch.Generator().manual_seed(0)
    mix = torch.randn(k, k, generator=random) * torch.logspace(-spread, spread, k)
    return torch.randn(n, k, generator=random), torch.randn(2 * k + 1, k, generator=random) @ mix


def batches(count: int = 3) -> list[Tensor]:
    return list(operands(1, K, 0.3)[1][:200].reshape(-1, 40, K)[:count])


def calibrated(model: nn.Module, scheme: Any = "w8a8", **keywords: Any) -> Recipe:
    keywords = {"rounding": "gptq", "progress": False, **keywords}
    return qfx.calibrate(model, batches(), replace(EVERY, scheme=scheme), **keywords)


def codes_of(recipe: Recipe) -> dict[str, Tensor]:
    return {str(s): s.rounding.codes for s in recipe.sites if s.rounding}


def run(model: nn.Module, recipe: Recipe | None, x: Tensor, **options: Any) -> Tensor:
    torch._dynamo.reset()
    with torch.no_grad():
        return compiled(model, recipe=recipe, **options)(x)


def nearest(recipe: Recipe) -> Recipe:
    return Recipe(tuple(replace(s, rounding=None) for s in recipe.sites))
