"""The compiled files of qfx: libqfx, whose operators PyTorch calls, and its Python face, qfx._C."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import qfx._C as _C

FACE = Path(_C.__file__)
LIBRARY = FACE.with_name("lib") / "libqfx.so"


def make_symbols_global() -> None:
    """Makes the symbols of libqfx visible to libraries that are loaded later: packages of
    AOTInductor find functions of operators by name. Raises OSError if the face was linked with a
    libqfx in another place."""
    ctypes.CDLL(str(LIBRARY), mode=os.RTLD_NOW | os.RTLD_NOLOAD | os.RTLD_GLOBAL)
