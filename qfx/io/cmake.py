"""cmake_prefix_path: the folder in which CMake finds qfx."""

from __future__ import annotations

from pathlib import Path

import qfx._C as _C


def cmake_prefix_path() -> str:
    """Returns the folder that CMake needs in `CMAKE_PREFIX_PATH` for `find_package(qfx)`, as
    `torch.utils.cmake_prefix_path` is for torch.

        path=$(python -c 'import qfx; print(qfx.cmake_prefix_path())')
        cmake -S . -B build -DCMAKE_PREFIX_PATH="$path"

    It contains the compiled files of qfx, which an editable installation keeps apart from the
    sources. Raises FileNotFoundError for an installation without libraries for C++.
    """
    assert _C.__file__ is not None
    prefix = Path(_C.__file__).resolve().parent
    config = prefix / "lib" / "cmake" / "qfx" / "qfx-config.cmake"
    if not config.is_file():
        raise FileNotFoundError(f"{config} is missing: this qfx was installed without it")
    return str(prefix)
