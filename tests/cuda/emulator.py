"""The CUDA operators on the emulator (tests/cuda), as operators torch.ops.qfx_emulated.* of CPU
tensors, and their arguments."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qfx.ops import REFERENCES
from qfx.ops.binary import cuda_binary_pack, unpacked_signs
from qfx.ops.header import header_of
from qfx.ops.weight import cuda_pack_weight
from tests.lib.builds import one_process
from tests.lib.rows import Row

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "cuda-emulated"  # kept, so that only what changed is compiled again
TORCH = Path(torch.__file__).parent
OPS = torch.ops.qfx_emulated
# What the emulated GPU can: Turing, Ampere, Hopper. Kernels choose their instructions by it.
CAPABILITIES = (75, 80, 90)


@functools.cache
def build() -> Path:
    """Builds the emulated kernels and the emulator's own tests; skips where nothing can."""
    if shutil.which("cmake") is None or shutil.which("ninja") is None:
        pytest.skip("cmake and ninja build the CUDA emulator, and one of them is not on the PATH")
    source = ROOT / "tests" / "cuda"
    configure = ["cmake", "-S", str(source), "-B", str(BUILD), "-G", "Ninja"]
    with one_process(BUILD):
        for command in ([*configure, f"-DQFX_TORCH={TORCH}"], ["cmake", "--build", str(BUILD)]):
            result = subprocess.run(command, capture_output=True, text=True, timeout=1800)
            assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}{result.stderr}"
    return BUILD


@functools.cache
def library() -> ctypes.CDLL:
    """The emulated operators, loaded: torch.ops.qfx_emulated has them from now on."""
    path = build() / "libqfx_emulated.so"
    torch.ops.load_library(path)
    return ctypes.CDLL(str(path))


def emulate(capability: int = 80, seed: int = 1) -> None:
    """What the GPU can from now on, and the order in which its threads run."""
    library().qfx_emulated_capability(ctypes.c_int(capability))
    library().qfx_emulated_seed(ctypes.c_uint64(seed))


def run(op: str, *arguments: Any) -> Any:
    return getattr(OPS, op).default(*arguments)


def packed_codes(codes: Tensor, group: int = 0) -> Tensor:
    """Codes int8 [N, K] as CUDA packs them, whose scales are 1."""
    return cuda_pack_weight(codes, torch.ones(len(codes)), group=group)


def cuda_packed(weight: Tensor) -> Tensor:
    """A weight that is packed for the CPU as CUDA packs it."""
    said = header_of(weight)
    if said.bits != 8:
        return weight
    layout = (said.n, said.bits, said.group, said.scale_group, said.shift)
    codes, scale, zero_point, _ = REFERENCES["unpack_weight"](weight, layout, said.k)
    shift = zero_point if said.shift else None
    return cuda_pack_weight(codes, scale, shift, group=said.group)


def cuda_packed_bits(packed: Tensor) -> Tensor:
    n, k = packed[16:32].view(torch.int64).tolist()
    return cuda_binary_pack(unpacked_signs(packed, n, k))


def reference_of(op: str) -> Callable[..., Any]:
    """What defines operator `op` on CUDA, in terms of a row's own arguments."""
    packing = {"pack_weight": cuda_pack_weight, "binary_pack": cuda_binary_pack}
    return packing.get(op, REFERENCES[op])


def arguments_of(row: Row) -> tuple[Any, ...]:
    """Those of row.arguments(), weights packed for CUDA."""
    names = [a.name for a in getattr(torch.ops.qfx, row.op).default._schema.arguments]
    given = row.arguments()
    convert = {"packed": cuda_packed_bits, "weight": cuda_packed}
    pairs = zip(names, given, strict=False)
    return tuple(convert[name](a) if name in convert else a for name, a in pairs)
