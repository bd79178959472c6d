"""Says what this build of qfx can run on a device."""

from __future__ import annotations

import warnings
from functools import cache

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
        if without := without_kernels():
            _warn_once(without)
        return "and this qfx was built without CUDA kernels"
    capability = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else OLDEST
    if capability < OLDEST:
        return f"of compute capability {capability[0]}.{capability[1]}; int8 needs 7.5"
    return None


def without_kernels() -> str | None:
    """Returns a sentence if PyTorch was built for CUDA and this build of qfx has no kernels for it,
    otherwise None."""
    if torch.version.cuda is None or _C.cuda_architectures():
        return None
    return (
        f"PyTorch {torch.__version__} runs on CUDA {torch.version.cuda}, and this qfx was built "
        "without CUDA kernels, so matmuls on a GPU stay float; docs/cuda.md says how to build them"
    )


@cache
def _warn_once(text: str) -> None:
    warnings.warn(f"qfx: {text}", stacklevel=2)


def has_kernel(operator: str, device: torch.device) -> bool:
    """Whether torch.ops.qfx.<operator> has a kernel for this kind of device."""
    key = {"cpu": "CPU", "cuda": "CUDA"}.get(device.type)
    found = key and operators.has_kernel(f"qfx::{operator}", key)
    return bool(found)


def name_of(device: torch.device) -> str:
    """Returns the GPU's name as reported by its driver, or a placeholder if no GPU is available."""
    seen = torch.cuda.is_available()
    return torch.cuda.get_device_name(device) if seen else "a GPU that is not there"
