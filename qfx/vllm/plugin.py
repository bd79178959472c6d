"""The plug-in that vLLM loads in each of its processes."""

from __future__ import annotations

import importlib


def register() -> None:
    """Makes the quantization method `qfx` known to vLLM, kernels for checkpoints in other forms,
    and caches of int8 and int4: the entry point `vllm.general_plugins`. vLLM calls it once or
    several times in each process, also where nobody uses the method."""
    importlib.import_module("qfx.vllm.quantization")
    importlib.import_module("qfx.vllm.kernels").register_kernels()
    importlib.import_module("qfx.vllm.cache").register_attention()
