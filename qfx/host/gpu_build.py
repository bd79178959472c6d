"""Says what this build of qfx can run on a device."""

from __future__ import annotations

import torch

import qfx._C as _C
from qfx.host import operators

OLDEST = (7, 5)  # the first GPUs with the int8 matrix instructions of csrc/cuda


def why_not(device: torch.device) -> str | None:
    """Returns why matmuls on this device stay float, or None. The text completes "the weight is on
    cuda"."""
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
    """Whether torch.ops.qfx.<operator> has a kernel for this kind of device."""
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device.type)
    found = key and operators.has_kernel(f"qfx::{operator}", key)
    return bool(found)


def name_of(device: torch.device) -> str:
    """Returns the GPU's name as reported by its driver, or a placeholder if no GPU is available."""
    seen = torch.cuda.is_available()
    return torch.cuda.get_device_name(device) if seen else "a GPU that is not there"
