"""Activations that the epilogue of a matmul computes, one row for each. (E2)"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """`reference`: its definition, on float32. `spelled`: calls in graphs that mean it, `.relu`
    for a tensor method, where they say what `settings` does; the last is the one that we make."""

    reference: Callable[[Tensor], Tensor]
    spelled: tuple[Any, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


_GELU = (F.gelu, aten.gelu.default)
ACTIVATIONS = {
    "none": Activation(lambda v: v),
    "relu": Activation(F.relu, (F.relu, torch.relu, ".relu", aten.relu.default)),
    "gelu": Activation(F.gelu, _GELU, {"approximate": "none"}),
    "gelu_tanh": Activation(
        lambda v: F.gelu(v, approximate="tanh"), _GELU, {"approximate": "tanh"}
    ),
    "silu": Activation(F.silu, (F.silu, aten.silu.default)),
}


def activate(name: str, y: Tensor) -> Tensor:
    """(E2) in float32."""
    return ACTIVATIONS[name].reference(y)
