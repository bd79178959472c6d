"""What this build can run on a device; asked of the dispatcher, where kernels are registered."""

from __future__ import annotations

import torch

import qfx._C as _C
from qfx.host import operators

OLDEST = (7, 5)  # the first GPUs with the int8 matrix instructions of csrc/cuda


def why_not(device: torch.device) -> str | None:
    """Why matmuls on this device stay float, or None. The words follow "the weight is on cuda"."""
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return "for which qfx has no kernels"
    if torch.version.hip:
        return "which is AMD's here; qfx's kernels are for NVIDIA's GPUs"
    if not _C.cuda_architectures():
        return "and this qfx was built without CUDA kernels"
    capability = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else OLDEST
    if capability < OLDEST:
        return f"of compute capability {capability[0]}.{capability[1]}; int8 needs 7.5"
    return None


def has_kernel(operator: str, device: torch.device) -> bool:
    """Whether torch.ops.qfx.<operator> runs on this kind of device."""
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device.type)
    found = key and operators.has_kernel(f"qfx::{operator}", key)
    return bool(found)


def name_of(device: torch.device) -> str:
    """The GPU's name as its driver tells it; of a fake one, what is not there to ask."""
    seen = torch.cuda.is_available()
    return torch.cuda.get_device_name(device) if seen else "a GPU that is not there"
