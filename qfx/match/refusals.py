"""Refusals: reasons why matmuls of certain operands stay float, common to all kinds of match."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from qfx.host.autograd import in_compiled_backward
from qfx.host.gpu_build import why_not
from qfx.values.limits import short, unserved_type


def of_operands(operands: Mapping[str, Any]) -> str | None:
    """Returns why int8 does not support one of the operands, or None if it supports all of them.
    `operands`: the tensors by name; None for a tensor that the graph does not determine."""
    for what, tensor in operands.items():
        if tensor is not None and (why := _fault(tensor)):
            return f"the {what} is {why}"
    return None


def _fault(tensor: Any) -> str | None:
    if not isinstance(tensor, Tensor):
        return "not a tensor"
    if why := unserved_type(tensor):
        return why
    if elsewhere := why_not(tensor.device):
        return f"on {tensor.device.type}, {elsewhere}"
    return None


def of_activations(what: str, operands: Mapping[str, Any], result: Any) -> str | None:
    """Returns why a matmul or an attention of activations stays float, or None if int8 supports it.
    `what`: its name in the reason."""
    tensors = (*operands.values(), result)
    if not all(isinstance(t, Tensor) for t in tensors):
        return f"{what} whose shapes are not known"
    if why := of_operands({**operands, "result": result}):
        return f"{what}: {why}"
    types, devices = sorted({short(t.dtype) for t in tensors}), {t.device.type for t in tensors}
    if len(types) > 1:
        return f"{what}: its operands are not of one type but {' and '.join(types)}"
    if len(devices) > 1:
        return f"{what}: its operands are on {' and '.join(sorted(devices))}"
    if in_compiled_backward():
        return f"{what} of a backward pass: `backward` says how gradients are computed"
    return None
