"""The plug-in that vLLM loads in each of its processes."""

from __future__ import annotations

import importlib

ATTENTION = "qfx.vllm.cache.CacheBackend"  # which vLLM imports where it attends on a CPU


def register() -> None:
    """Makes the quantization method `qfx` known to vLLM, kernels for checkpoints in other forms,
    and caches of int8 and int4: the entry point `vllm.general_plugins`. vLLM calls it once or
    several times in each process, also where nobody uses the method.

    The platform chooses one class for attention on CPUs, whatever is selected, so ATTENTION takes
    its place; caches of other dtypes stay with the code of vLLM. With a version of vLLM that was
    not tried, vLLM's class stays.
    """
    quantization = importlib.import_module("qfx.vllm.quantization")
    importlib.import_module("qfx.vllm.kernels").register_kernels()
    if quantization.is_tried():
        registry = importlib.import_module("vllm.v1.attention.backends.registry")
        registry.register_backend(registry.AttentionBackendEnum.CPU_ATTN, ATTENTION)
