"""What nvcc makes of the CUDA kernels: the extension built with them, and cuobjdump's reading."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib.builds import one_process, with_cpu_objects
from tests.lib.pairs import usual

ROOT = Path(__file__).resolve().parents[2]
_TABLE = (ROOT / "csrc" / "cuda" / "sm90" / "kernels.inc").read_text()
HOPPER = re.findall(r"^QFX_..\((\w+),", _TABLE, re.M)  # the kernels that CMake makes files of
# The sources differ between 7.5 and later alone. 9.0 has the code of 8.0, and Hopper's.
ARCHITECTURES = usual(["80"], ["75", "80"])
BUILD = ROOT / "build" / "cuda-nvcc"  # kept, so that only what changed is compiled again
_MEMORY = re.compile(r"^ Function (\S+?):\n +REG:\d+ STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", re.M)
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.x]*)", re.M)


def _run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}{result.stderr}"
    return result.stdout


@functools.cache
def build() -> Path:
    """Builds the extension with CUDA kernels, whatever torch this is; skips without nvcc."""
    missing = [tool for tool in ("nvcc", "cmake", "ninja") if shutil.which(tool) is None]
    if missing:
        pytest.skip(
            f"CUDA kernels are not compiled here: no {' and no '.join(missing)} on the PATH"
        )
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "QFX_CUDA": "ON",
        "QFX_CUDA_ARCHITECTURES": ";".join([*(f"{a}-real" for a in ARCHITECTURES[:-1]), "80"]),
        "CMAKE_CXX_FLAGS_RELEASE": "-O0",  # of what is C++, which is tested elsewhere
        "CMAKE_CUDA_FLAGS": "-Werror=all-warnings",
        "Python_EXECUTABLE": sys.executable,
    }
    given = [f"-D{name}={value}" for name, value in options.items()] + with_cpu_objects()
    with one_process(BUILD):
        _run("cmake", "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", *given)
        _run("cmake", "--build", str(BUILD), "--target", "_C")
    return BUILD


def extension() -> Path:
    (path,) = build().glob("_C.*.so")
    return path


def objects() -> list[Path]:
    """The objects of the present sources: a kept build still has those of renamed files."""
    compiled = build().glob("CMakeFiles/qfx_cuda*.dir/**/*.cu.o")
    sources = {source.name for source in (ROOT / "csrc" / "cuda").rglob("*.cu")}
    sources |= {f"{kernel}.cu" for kernel in HOPPER}
    return sorted(path for path in compiled if path.name.removesuffix(".o") in sources)


def _cuobjdump(*arguments: str) -> str:
    """That of pip's nvidia-cuda-cuobjdump, beside which nvdisasm lies, or the toolkit's."""
    places = [str(p) for p in Path(sys.prefix).glob("lib/python*/site-packages/nvidia/cu*/bin")]
    path = os.pathsep.join([*places, os.environ["PATH"]])
    program = shutil.which("cuobjdump", path=path)
    if program is None or shutil.which("nvdisasm", path=path) is None:
        pytest.skip("cuobjdump and nvdisasm read machine code, and one of them is not there")
    command, environment = [program, *arguments], {**os.environ, "PATH": path}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    return result.stdout


def memory_of_kernels(path: Path) -> dict[str, int]:
    """Bytes of stack and local memory of each kernel, which is where registers are spilled to."""
    found = _MEMORY.findall(_cuobjdump("--dump-resource-usage", str(path)))
    return {name: int(stack) + int(local) for name, stack, local in found}


@functools.cache
def instructions_of(path: Path, architecture: str) -> frozenset[str]:
    """Names of the instructions in an object file's code for sm_`architecture`."""
    text = _cuobjdump("-sass", "-arch", f"sm_{architecture}", str(path))
    return frozenset(_INSTRUCTION.findall(text))
