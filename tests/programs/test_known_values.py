"""What a graph computes from numbers alone is a constant of its program, and masks of positions are
views."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qfx.programs import Runner, build

TOKENS = 5


class Masked(nn.Module):
    """A mask [B, 1, T, T] as transformers makes it, from positions."""

    def forward(self, seen: Tensor) -> Tensor:
        batch, at = torch.arange(len(seen)), torch.arange(TOKENS)
        every = at.new_ones((), dtype=torch.bool) & (at >= 0)
        known = seen.bool()[batch[:, None, None, None], at[None, None, None, :]]
        return (every & known).expand(-1, -1, TOKENS, -1).float()


def _built(model: nn.Module, *inputs: Tensor) -> Runner:
    return build(torch.export.export(model, inputs).module(), inputs)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_mask_of_positions_needs_no_pytorch(batch: int) -> None:
    seen = (torch.rand(batch, TOKENS) < 0.5).long() * 3
    runner = _built(Masked(), seen)
    assert runner.outside == []
    assert torch.equal(runner(seen)[0], Masked()(seen))


class Picked(nn.Module):
    """Positions in another order than they lie."""

    def forward(self, x: Tensor) -> Tensor:
        return x[torch.arange(2)[:, None], torch.arange(3) + 1]


def test_an_index_in_another_order_is_none() -> None:
    x = torch.randn(2, 4)
    assert torch.equal(_built(Picked(), x)(x)[0], Picked()(x))


class Buffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        scale: Any = self.scale
        return x * (scale + torch.arange(3))


def test_a_buffer_may_change() -> None:
    model, x = Buffer(), torch.randn(3)
    gm: Any = torch.export.export(model, (x,)).module()
    runner = build(gm, (x,))
    gm.scale += 1
    assert torch.equal(runner(x)[0], gm(x))


class Accumulated(nn.Module):
    """Writes to what it made of numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros(3).add_(x)


def test_memory_that_is_written_to_is_no_constant() -> None:
    x = torch.randn(3)
    runner = _built(Accumulated(), x)
    for _ in range(2):
        assert torch.equal(runner(x)[0], x)
