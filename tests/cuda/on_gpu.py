"""Runs the tests of the emulated CUDA operators on a GPU:

    pytest -p tests.cuda.on_gpu tests/cuda/test_cuda_rows.py tests/cuda/test_cuda_gemm.py \\
        tests/cuda/test_cuda_laws.py tests/cuda/test_cuda_lowbit.py

Operators are then those of qfx on CUDA tensors, into which arguments are copied, and from which
results are copied back. What the emulated GPU can do, and the order of its threads, mean nothing
there. Tests of the emulator itself run as ever.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tests.cuda import emulator


def emulate(capability: int = 80, seed: int = 1) -> None:
    """Does nothing: a GPU is what it is."""


def run(op: str, *arguments: Any) -> Any:
    """Calls an operator on copies of the arguments on the GPU."""
    return _moved(getattr(torch.ops.qfx, op).default(*_moved(arguments, "cuda")), "cpu")


def _moved(values: Any, device: str) -> Any:
    return tree_map(lambda v: _copied(v, device) if isinstance(v, Tensor) else v, values)


def _copied(values: Tensor, device: str) -> Tensor:
    """Copies with the strides, which some tests are about, also where elements share memory."""
    if values.numel() == 0:
        return values.to(device)
    extent = 1 + sum(s * (n - 1) for n, s in zip(values.shape, values.stride(), strict=True))
    memory = values.as_strided((extent,), (1,)).to(device)
    return memory.as_strided(values.shape, values.stride())


emulator.emulate, emulator.run = emulate, run  # type: ignore[assignment]
