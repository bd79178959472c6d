"""Why a weight becomes no codes: by its type and shape, and by its values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qfx.host.tensors import has_values, wraps_tensors
from qfx.memory.held import drop_file_pages
from qfx.values.floats import FLOATS, LARGEST_K, SERVED

_LARGEST = 2.0**100  # below it rotated sums and scales are finite in float32


def unserved(weight: Any) -> str:
    """The fault of a weight's type or layout; '' without one. The weight is not read."""
    if not isinstance(weight, Tensor):
        return ""
    if wraps_tensors(weight):
        return f"its weight is a {type(weight).__name__}, a tensor subclass"
    if weight.dtype not in FLOATS:
        return f"its weight is {weight.dtype}; {SERVED}"
    if weight.layout != torch.strided:
        return f"its weight has the layout {weight.layout}, to_dense() makes it a matrix"
    if weight.ndim == 2 and not weight.numel():
        return f"its weight {list(weight.shape)} has no elements"
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
