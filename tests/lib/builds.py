"""Builds that several test files need, which may run in several processes."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

from filelock import FileLock

BUILD = Path(__file__).resolve().parents[2] / "build"


def one_process(folder: Path) -> FileLock:
    """Returns a lock that the process that builds in `folder` holds; the others wait and find the
    result."""
    folder.parent.mkdir(exist_ok=True)
    return FileLock(folder.with_suffix(".lock"))


@functools.cache
def cpu_objects() -> Path | None:
    """Returns the folder of the up-to-date objects of csrc/cpu from which the extension was linked.
    Returns None if it was not built in this folder, or cannot be built here."""
    for objects in BUILD.glob("cp*-abi3-*/CMakeFiles/qfx_cpu.dir/csrc/cpu"):
        folder = objects.parents[3]
        with one_process(folder):
            command = ["cmake", "--build", str(folder), "--target", "qfx_cpu"]
            if subprocess.run(command, capture_output=True, timeout=1800).returncode == 0:
                return objects
    return None


def with_cpu_objects() -> list[str]:
    """Returns the CMake arguments that name the objects."""
    return [f"-DQFX_CPU_OBJECTS={cpu_objects() or ''}"]


@functools.cache
def programs_prefix(*cross: str) -> Path:
    """Returns the folder in which the library of programs (csrc/c_api) is installed, with its
    header and what find_package reads, after building it by itself: for another processor with
    CMake's arguments `cross`, as a static library. Raises RuntimeError with what the compiler
    said."""
    folder = BUILD / ("programs-cross" if cross else "programs")
    given = (*cross, "-DBUILD_SHARED_LIBS=OFF") if cross else with_cpu_objects()
    with one_process(folder):
        source = str(BUILD.parent / "csrc" / "c_api")
        _run("cmake", "-S", source, "-B", str(folder), "-G", "Ninja", *given)
        _run("cmake", "--build", str(folder))
        _run("cmake", "--install", str(folder), "--prefix", str(folder / "installed"))
    return folder / "installed" / "qfx"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
