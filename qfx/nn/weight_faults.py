"""Reasons why a linear cannot be quantized: dtype and shape of its weight and bias, and their
values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from qfx.host.tensors import has_values
from qfx.values.limits import LARGEST_K, unserved_type
from qfx.weights.offload import drop_file_pages

_LARGEST = 2.0**100  # rotated sums and scales of smaller values are finite in float32


def unserved_weight(weight: Any) -> str:
    """Returns what is wrong with a weight's dtype or layout, or ''. Does not read its values."""
    if not isinstance(weight, Tensor):
        return ""
    if why := unserved_type(weight):
        return f"its weight is {why}"
    if weight.ndim == 2 and not weight.numel():
        return f"its weight {list(weight.shape)} has no elements"
    return ""


def unserved_bias(bias: Any, weight: Any) -> str:
    """Returns what is wrong with the bias of a weight [N, K], or ''. Does not read values."""
    if not isinstance(bias, Tensor) or not isinstance(weight, Tensor) or weight.ndim != 2:
        return ""
    if is_lazy(bias):
        return "its bias has no shape yet: run the model once first"
    if why := unserved_type(bias):
        return f"its bias is {why}"
    if bias.shape != weight.shape[:1]:
        return f"its bias has shape {list(bias.shape)}, expected {list(weight.shape[:1])}"
    if bias.device != weight.device:
        return f"its bias is on {bias.device} and its weight on {weight.device}"
    return ""


def too_long(weight: Any) -> str:
    """Returns a message if sums of int8 products with a weight [N, K] may overflow, or ''."""
    if not isinstance(weight, Tensor) or weight.ndim != 2 or weight.shape[1] <= LARGEST_K:
        return ""
    return f"K={weight.shape[1]} is above {LARGEST_K}, where an int32 accumulator could overflow"


@torch.no_grad()
def unquantizable(weight: Any) -> str:
    """Returns what is wrong with a weight's values, or ''. Reads them, if there are any."""
    if not isinstance(weight, Tensor) or not has_values(weight) or weight.ndim != 2:
        return ""
    least, most = (float(extreme) for extreme in weight.detach().aminmax())
    drop_file_pages(weight)
    largest = max(abs(least), abs(most))
    if least != least or most != most or largest == float("inf"):
        return "its weight holds NaN or infinity"
    if largest > _LARGEST:
        return f"its weight holds {largest:.3g}: scales above {_LARGEST:.3g} may overflow"
    return ""
