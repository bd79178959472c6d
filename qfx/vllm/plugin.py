"""The plug-in that vLLM loads in each of its processes."""

from __future__ import annotations

import importlib
import os

KERNELS = "QFX_VLLM_KERNELS"  # an environment variable: 1 for `qfx.vllm.kernels`


def register() -> None:
    """Makes the quantization method `qfx` known to vLLM, and kernels for checkpoints in other forms
    if the environment variable asks for them: the entry point `vllm.general_plugins`. vLLM calls it
    once or several times in each process, also where nobody uses the method."""
    importlib.import_module("qfx.vllm.quantization")
    if os.environ.get(KERNELS) == "1":
        importlib.import_module("qfx.vllm.kernels").register_kernels()
