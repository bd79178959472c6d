"""Facts about an installation, which a report of a defect needs."""

from __future__ import annotations

import platform

import torch

import qfx
import qfx._C as _C
from qfx.cost.disk import cpu_name
from qfx.host.gpu_build import without_kernels
from qfx.host.native_library import FACE, LIBRARY
from qfx.io.disk_cache import cached_files


def facts() -> dict[str, str]:
    """Returns facts about this installation, by their names: versions, processor, kernels, compiled
    files, files in the user's cache."""
    folder, files = cached_files()
    size = sum(file.stat().st_size for file in files)
    compiled = FACE.stat().st_size + LIBRARY.stat().st_size
    return {
        "qfx": qfx.__version__,
        "Python": platform.python_version(),
        "PyTorch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        "processor": f"{cpu_name()}, {torch.get_num_threads()} threads",
        "instruction set": f"{_C.isa()} (of {', '.join(_C.isas())})",
        "CUDA kernels": ", ".join(_C.cuda_architectures()) or without_kernels() or "none",
        "compiled files": f"{LIBRARY} and {FACE.name}, {compiled / 1e6:.1f} MB",
        "cache": f"{folder}, {len(files)} files, {size / 1e6:.1f} MB",
    }
