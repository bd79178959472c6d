"""Graphs of aten operators, traced from graphs of PyTorch functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from qfx.host.tensors import fake_mode_of


def aten_graph(gm: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """Returns the graph for inputs of these shapes, as `torch.export.export` makes it: linears,
    norms and attention remain one operator each. Nothing is computed, and no gradient recorded.
    """
    mode = fake_mode_of(inputs) or FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [
        mode.from_tensor(x, static_shapes=True) if isinstance(x, Tensor) else x for x in inputs
    ]
    with torch.no_grad(), mode:
        return make_fx(gm, pre_dispatch=True, tracing_mode="fake")(*fakes)
