"""Compiled inference runs no Python function of autograd; what records gradients still does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qfx.ops.registry

REGISTRY = Path(qfx.ops.registry.__file__)


def autograd_calls(function: Callable[..., Any], *arguments: Tensor) -> int:
    """How many times the autograd kernel of a qfx operator is entered."""
    count = 0

    def seen(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        code = frame.f_code
        count += event == "call" and code.co_name == "kernel" and Path(code.co_filename) == REGISTRY

    sys.setprofile(seen)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return count


class Net(nn.Module):
    """`switching`: gradients are recorded inside, whatever the caller wants."""

    def __init__(self, switching: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32))
        self.switching = switching

    def forward(self, x: Tensor) -> Tensor:
        if self.switching:
            with torch.enable_grad():
                return self.layers(x)
        return self.layers(x)


def compiled(model: nn.Module, inner: str = "inductor") -> Any:
    return torch.compile(model, backend="qfx", options={"minimum_gain": 0, "inner": inner})


@pytest.mark.parametrize(("inner", "calls"), [("inductor", 0), ("eager", 2)])
def test_inference_enters_no_autograd_kernel(inner: str, calls: int) -> None:
    function, x = compiled(Net().eval(), inner), torch.randn(3, 64)
    with torch.no_grad():
        y = function(x)
        assert autograd_calls(function, x) == calls
    assert not y.requires_grad


def test_gradients_are_recorded_by_the_same_function() -> None:
    model, x = Net(), torch.randn(3, 64)
    function = compiled(model)
    with torch.no_grad():
        function(x)
    function(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_graph_that_records_gradients_itself_is_left_alone() -> None:
    model, x = Net(switching=True), torch.randn(3, 64)
    with torch.no_grad():
        y = compiled(model)(x)
    assert y.requires_grad
    y.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_versions_still_count_writes() -> None:
    """A write in the graph is seen by whoever saved the tensor before."""

    class Writes(Net):
        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2)
            return self.layers(x)

    function, x = compiled(Writes().eval()), torch.randn(3, 64)
    with torch.no_grad():
        function(x)
        before = x._version
        function(x)
    assert x._version > before
