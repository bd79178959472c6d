"""The float dtypes, and the longest sums, that int8 supports."""

from __future__ import annotations

import torch
from torch import Tensor

from qfx.host.tensors import wraps_tensors

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_K = 65792  # docs/numerics.md (G1)
SERVED = "int8 serves float32, bfloat16 and float16"


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def unserved_type(tensor: Tensor) -> str:
    """Returns what int8 does not support about a tensor's type, in words that complete "is", or ''
    if it supports the type. Does not read the tensor."""
    if tensor.is_nested:
        return "a nested tensor"
    if wraps_tensors(tensor):
        return f"a {type(tensor).__name__}, a tensor subclass"
    if tensor.dtype not in FLOATS:
        return f"{short(tensor.dtype)}; {SERVED}"
    if tensor.layout != torch.strided:
        return f"of the layout {tensor.layout}, to_dense() makes it dense"
    return ""
