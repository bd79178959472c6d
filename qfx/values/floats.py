"""The float types, and the longest sums, that int8 serves."""

from __future__ import annotations

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_K = 65792  # docs/numerics.md (G1)
SERVED = "int8 serves float32, bfloat16 and float16"


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
