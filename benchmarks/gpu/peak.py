"""The peak of Hopper's matrix instructions, on operands that never leave shared memory: peak.cu,
which is compiled for the measurement."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.common import ROOT
from benchmarks.gpu.clock import seconds
from benchmarks.gpu.session import Row, Session

SOURCE = Path(__file__).with_suffix(".cu")
HOPPER = (9, 0)
TILE_BYTES, THREADS = 48 * 1024, 256  # of a block, as in peak.cu
STEPS = 20_000  # some milliseconds


def peaks(session: Session) -> Iterator[Row]:
    why = _why_not(session)
    if why is not None:
        yield {"what": "instructions", "result": f"skipped: {why}"}
        return
    library = ctypes.CDLL(str(build(session.out)))
    library.peak_multiplies.restype = ctypes.c_double
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    for operands in ("s8", "b1"):
        took = seconds([_Launch(library, operands, blocks)], session.device)
        multiplies = library.peak_multiplies(operands.encode(), blocks, STEPS)
        speed = 2 * multiplies / took / 1e12
        yield {"what": f"{operands} instructions", "TOPS": speed, "ms": took * 1e3}


def build(folder: Path) -> Path:
    """Builds the shared library of peak.cu. Raises RuntimeError with the output of nvcc."""
    target = folder / "peak.so"
    include = Path(torch.__file__).parent / "include"
    command = ["nvcc", "-shared", "-std=c++20", "-O3", "-Xcompiler", "-fPIC",
               "-gencode=arch=compute_90a,code=sm_90a", f"-I{ROOT / 'csrc'}", "-isystem",
               str(include), str(SOURCE), "-o", str(target)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise RuntimeError(f"nvcc does not compile peak.cu: {done.stderr.strip()}")
    return target


def _why_not(session: Session) -> str | None:
    if session.dry:
        return "a dry run"
    if torch.cuda.get_device_capability() != HOPPER:
        return f"{session.name} is not of compute capability 9.0"
    return None if shutil.which("nvcc") else "no nvcc on the PATH"


class _Launch:
    """A launch on random operands, on the current stream."""

    def __init__(self, library: ctypes.CDLL, operands: str, blocks: int) -> None:
        self.library, self.operands, self.blocks = library, operands.encode(), blocks
        self.tiles = torch.randint(-128, 128, (TILE_BYTES,), dtype=torch.int8, device="cuda")
        self.sums = torch.empty(blocks * THREADS, dtype=torch.int32, device="cuda")

    def __call__(self) -> None:
        pointers = (self.tiles.data_ptr(), self.sums.data_ptr())
        stream = torch.cuda.current_stream().cuda_stream
        given = [*map(ctypes.c_void_p, (*pointers, stream))]
        error = self.library.peak_launch(self.operands, self.blocks, STEPS, *given)
        if error:
            raise RuntimeError(f"peak.cu was not launched: CUDA error {error}")
