"""The wheel of this tree: built once, from the objects of the installation, and unpacked."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.lib.builds import BUILD, cpu_objects, one_process

ROOT = Path(__file__).resolve().parents[2]
CROSS = ("CMAKE_SYSTEM_NAME=Linux", "CMAKE_SYSTEM_PROCESSOR=aarch64", "QFX_CUDA=OFF")


def run(*command: str | Path, cwd: Path = ROOT, timeout: float = 900) -> str:
    """Returns what a command has printed, which must succeed."""
    result = subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=timeout
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@functools.cache
def built() -> Path:
    """Returns a wheel of this tree, tagged by auditwheel."""
    if cpu_objects() is None:
        pytest.skip("the wheel is built from the objects of `make setup` alone, and there are none")
    folder = BUILD / "wheel"
    with one_process(folder):
        if not _is_current(folder):
            shutil.rmtree(folder, ignore_errors=True)
            _build(folder)
    (found,) = folder.glob("*manylinux*.whl")
    return found


def _is_current(folder: Path) -> bool:
    """Whether a wheel of an earlier run lies there, and no source has changed since."""
    wheels = list(folder.glob("*manylinux*.whl"))
    sources = [ROOT / "CMakeLists.txt", ROOT / "pyproject.toml"]
    for part in ("csrc", "qfx"):
        sources += [path for path in (ROOT / part).rglob("*.*") if path.suffix != ".pyc"]
    newest = max(path.stat().st_mtime for path in sources)
    return bool(wheels) and newest < wheels[0].stat().st_mtime


def built_for_aarch64(folder: Path) -> Path:
    """Returns a wheel of this tree for 64-bit ARM, compiled here: `make wheel ARCH=aarch64`."""
    _build(
        folder,
        *(f"--config-settings=cmake.define.{each}" for each in CROSS),
        CXX="aarch64-linux-gnu-g++",
        _PYTHON_HOST_PLATFORM="linux-aarch64",
    )
    (found,) = folder.glob("*manylinux*.whl")
    return found


def _build(folder: Path, *settings: str, **environment: str) -> None:
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
    variables = [f"{name}={value}" for name, value in environment.items()]
    run("env", *variables, *pip, *settings, "-w", folder / "any", ROOT)
    (plain,) = (folder / "any").glob("*.whl")
    libraries = ("libtorch.so", "libtorch_cpu.so", "libc10.so", "libqfx.so")
    excluded = [word for name in libraries for word in ("--exclude", name)]
    run(sys.executable, "-m", "auditwheel", "repair", "-w", folder, *excluded, plain)


@functools.cache
def unpacked() -> Path:
    """Returns a folder with the content of the wheel, as an installation has it."""
    folder = BUILD / "wheel" / "unpacked"
    wheel = built()
    with one_process(folder):
        if not (folder / "qfx").exists():
            with zipfile.ZipFile(wheel) as file:
                file.extractall(folder)
    return folder
