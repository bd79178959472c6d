"""Operators in the dispatcher: overloads, schemas and kernels; and operators without a public
name."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

__all__ = [
    "ENCODER_LAYER",
    "GROUPED_MATMULS",
    "TO_COPY",
    "UNNAMED_MATMULS",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "has_kernel",
    "overload_for",
    "overloads",
    "schema",
]

ENCODER_LAYER: Any = torch._transformer_encoder_layer_fwd
TO_COPY: Any = torch.ops.aten._to_copy.default
_UNNAMED = ("_native_multi_head_attention", "_int_mm")
UNNAMED_MATMULS: tuple[Any, ...] = (
    ENCODER_LAYER,
    *(getattr(torch, name) for name in _UNNAMED if hasattr(torch, name)),
)


# grouped_mm, as the versions of PyTorch name it
GROUPED_MATMULS: tuple[Any, ...] = (
    torch._grouped_mm,
    torch.ops.aten._grouped_mm.default,
    *(f for f in (getattr(torch.nn.functional, "grouped_mm", None),) if f is not None),
)
# Softmax over one dimension, as it appears in graphs before and after decomposition.
SOFTMAX = (torch.ops.aten.softmax.int, torch.ops.aten._softmax.default)


def overloads(target: Any) -> list[Any]:
    """Returns all operators of a packet such as `torch.ops.aten.mm`; an empty list for other
    targets."""
    if not isinstance(target, OpOverloadPacket):
        return []
    return [getattr(target, name) for name in target.overloads()]


def overload_for(packet: Any, args: Any, kwargs: Any) -> Any:
    """Returns the operator of a packet that is called with these arguments."""
    return getattr(
        packet, torch._C._jit_resolve_packet(str(packet).replace(".", "::"), *args, **kwargs)
    )


def schema(operator: Any) -> Any:
    """Returns the schema (arguments with names, defaults and writes) of an operator, or of a
    packet's default overload."""
    overload = operator if isinstance(operator, OpOverload) else operator.default
    return overload._schema


def has_kernel(name: str, key: str) -> bool:
    """Whether the operator, for example "qfx::quantize", has a kernel for a dispatch key such as
    "CUDA"."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))
