"""Operators as the dispatcher knows them: overloads, schemas, kernels; and those without a name."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

__all__ = [
    "ENCODER_LAYER",
    "TO_COPY",
    "UNNAMED_MATMULS",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "has_kernel",
    "overloads",
    "schema",
]

ENCODER_LAYER: Any = torch._transformer_encoder_layer_fwd
TO_COPY: Any = torch.ops.aten._to_copy.default
_UNNAMED = ("_native_multi_head_attention", "_int_mm", "_grouped_mm")
UNNAMED_MATMULS: tuple[Any, ...] = (
    ENCODER_LAYER,
    *(getattr(torch, name) for name in _UNNAMED if hasattr(torch, name)),
)


# Softmax over one dimension, as graphs spell it before and after they are decomposed.
SOFTMAX = (torch.ops.aten.softmax.int, torch.ops.aten._softmax.default)


def overloads(target: Any) -> list[Any]:
    """Of a packet, as `torch.ops.aten.mm`, all of its operators; of other targets none."""
    if not isinstance(target, OpOverloadPacket):
        return []
    return [getattr(target, name) for name in target.overloads()]


def schema(operator: Any) -> Any:
    """Arguments with names, defaults and what is written; of a packet those of its default."""
    overload = operator if isinstance(operator, OpOverload) else operator.default
    return overload._schema


def has_kernel(name: str, key: str) -> bool:
    """Whether the operator, as "qfx::quantize", has a kernel for a dispatch key, as "CUDA"."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))
