"""Shapes: the fake tensors of all nodes, and the storage of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from qfx.host.operators import OpOverloadPacket, overload_for
from qfx.host.tensors import OF_VALUES, FakeMode, fake_mode, storage_key


class Shapes(fx.Interpreter):
    """Runs a graph on fake tensors: `of[node]` is the value of each node for inputs of these
    shapes. Views share the storage of their source. A node that calls any overload of an operator
    is edited to call the one for its arguments."""

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        super().__init__(gm)
        self.mode: FakeMode = fake_mode()
        self.of: dict[fx.Node, Any] = {}
        self.constants: dict[int, Tensor] = {}  # by the storage of their fake tensor
        with self.mode, torch.no_grad():
            self.run(*(_plain(value) for value in inputs))

    def run_node(self, node: fx.Node) -> Any:
        if isinstance(node.target, OpOverloadPacket):
            args, kwargs = self.fetch_args_kwargs_from_env(node)
            node.target = overload_for(node.target, args, kwargs)
        try:
            result = super().run_node(node)
        except OF_VALUES as error:
            raise NotImplementedError(
                f"{node} depends on the values of tensors ({node.target}): a program knows all "
                "shapes and numbers when it is made"
            ) from error
        self.of[node] = result
        return result

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = self.fetch_attr(target)
        if not isinstance(value, Tensor):
            return value
        fake = self.mode.from_tensor(value)
        self.constants[storage_key(fake)] = value
        return fake


def _plain(value: Tensor) -> Tensor:
    """Returns a contiguous tensor of the same shape in memory of its own."""
    return torch.empty(value.shape, dtype=value.dtype, device=value.device)
