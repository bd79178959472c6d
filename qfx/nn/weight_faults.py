"""Why a linear becomes no codes: by the type and shape of its weight and bias, and by values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from qfx.host.tensors import has_values
from qfx.values.floats import LARGEST_K, unserved_type
from qfx.weights.offload import drop_file_pages

_LARGEST = 2.0**100  # below it rotated sums and scales are finite in float32


def unserved_weight(weight: Any) -> str:
    """The fault of a weight's type or layout; '' without one. The weight is not read."""
    if not isinstance(weight, Tensor):
        return ""
    if why := unserved_type(weight):
        return f"its weight is {why}"
    if weight.ndim == 2 and not weight.numel():
        return f"its weight {list(weight.shape)} has no elements"
    return ""


def unserved_bias(bias: Any, weight: Any) -> str:
    """The fault of a bias beside a weight [N, K]; '' without one. Nothing is read."""
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
    """The fault of a weight [N, K] whose sums of int8 products may overflow; '' without one."""
    if not isinstance(weight, Tensor) or weight.ndim != 2 or weight.shape[1] <= LARGEST_K:
        return ""
    return f"K={weight.shape[1]} is above {LARGEST_K}, where an int32 accumulator could overflow"


@torch.no_grad()
def unquantizable(weight: Any) -> str:
    """The fault of a weight's values, which are read; '' without one, and where it has none."""
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
