"""The activation functions that the epilogue of a matmul computes, equation (E2): one row of
ACTIVATIONS for each row of `csrc/activations.inc`, in the same order."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qfx._C as _C
from qfx.graph.patterns import Pattern

aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """One activation function: its definition, and its forms in graphs and models.

    `reference` defines it on float32. `spelled`: the calls in graphs that mean it, written `.relu`
    for a tensor method, provided that their arguments agree with `settings`; `plain`: those that
    mean it without settings. `module`: the class of torch.nn that makes such a call and also takes
    `settings`. `composed`: patterns of several calls that together mean it; `v` is the input of the
    function.
    """

    reference: Callable[[Tensor], Tensor]
    spelled: tuple[Any, ...] = ()
    module: type[nn.Module] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    composed: tuple[Pattern, ...] = ()
    plain: tuple[Any, ...] = ()


_CALLS = {
    "mul": (operator.mul, torch.mul, ".mul", aten.mul.Tensor),
    "sigmoid": (torch.sigmoid, ".sigmoid", aten.sigmoid.default),
}


def _composed(*texts: str) -> tuple[Pattern, ...]:
    return tuple(Pattern(text, _CALLS, v="node") for text in texts)


_GELU = (F.gelu, aten.gelu.default)
ACTIVATIONS = {
    "none": Activation(lambda v: v),
    "relu": Activation(
        F.relu,
        (F.relu, torch.relu, torch.relu_, ".relu", ".relu_", aten.relu_.default, aten.relu.default),
        nn.ReLU,
    ),
    "gelu": Activation(F.gelu, _GELU, nn.GELU, {"approximate": "none"}),
    "gelu_tanh": Activation(
        lambda v: F.gelu(v, approximate="tanh"), _GELU, nn.GELU, {"approximate": "tanh"}
    ),
    "silu": Activation(
        F.silu, (F.silu, aten.silu_.default, aten.silu.default), nn.SiLU,
        composed=_composed("mul(v, sigmoid(v))", "mul(sigmoid(v), v)"),
    ),
    "quick_gelu": Activation(
        lambda v: v * torch.sigmoid(1.702 * v),
        composed=_composed(
            "mul(v, sigmoid(mul(1.702, v)))", "mul(v, sigmoid(mul(v, 1.702)))",
            "mul(sigmoid(mul(1.702, v)), v)", "mul(sigmoid(mul(v, 1.702)), v)",
        ),
    ),
    "hardswish": Activation(
        F.hardswish,
        (F.hardswish, aten.hardswish_.default, aten.hardswish.default), nn.Hardswish,
    ),
    "relu6": Activation(
        F.relu6, (F.hardtanh, aten.hardtanh_.default, aten.hardtanh.default), nn.Hardtanh,
        {"min_val": 0.0, "max_val": 6.0}, plain=(F.relu6, aten.relu6.default),
    ),
}  # fmt: skip
# Operators refer to activations by name, programs by index.
assert list(ACTIVATIONS) == _C.activations, (
    f"the kernels have the activations {_C.activations}, ACTIVATIONS has {list(ACTIVATIONS)}"
)


def activate(name: str, y: Tensor) -> Tensor:
    """Applies the activation function of this name in float32, equation (E2)."""
    return ACTIVATIONS[name].reference(y)
