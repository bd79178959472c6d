"""What a graph writes in place, and indices that its code has as constants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qfx.programs import Runner, build
from tests.programs.traced import built

aten = torch.ops.aten
OPERATIONS = [getattr(aten, name).Tensor for name in ("add_", "sub_", "mul_", "div_")]


def _own(f: Any) -> Any:
    """Of a copy, which may be written."""
    return lambda a, b: f(aten.clone.default(a), b)


@pytest.mark.parametrize("target", OPERATIONS, ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (1, 4), (4,), ()])
def test_a_tensor_is_changed_in_place(target: Any, shape: tuple[int, ...]) -> None:
    a, b = torch.randn(3, 4), torch.randn(shape) + 3
    f = _own(lambda x, y: target(x, y))
    runner = built(f, (a, b))
    assert runner.outside == [] and torch.equal(runner(a, b)[0], f(a, b))


class _Parts(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x[..., :-2, :] + 0, x[..., [-2], :], x[..., [-1], :], x[:, [1]], x[[0]]


class _Indexed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("at", torch.tensor([1]))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x[:, self.at] * 2
        return y


def _exported(module: nn.Module, x: Tensor) -> Runner:
    return build(torch.export.export(module, (x,)).module(), (x,))  # type: ignore[arg-type]


def test_constant_indices_are_copies_of_slices() -> None:
    x = torch.randn(2, 3, 5, 4)
    runner = _exported(_Parts(), x)
    assert runner.outside == []
    for found, expected in zip(runner(x), _Parts()(x), strict=True):
        assert torch.equal(found, expected)


def test_an_index_that_is_a_buffer_is_read_at_each_call() -> None:
    x, module = torch.randn(2, 3, 4), _Indexed()
    runner = _exported(module, x)
    assert torch.equal(runner(x)[0], x[:, [1]] * 2)
    module.at.fill_(2)
    assert torch.equal(runner(x)[0], x[:, [2]] * 2)
