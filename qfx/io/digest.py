"""Digests: SHA-256 of the values of tensors, and of qfx itself.

They are used outside of the process, in the keys of files on disk and in recipes. Other ways to
detect a changed tensor are described in qfx/weights/change_detection.py.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from qfx.host.native_library import FACE, LIBRARY

_AT_ONCE = 2**20  # elements of a tensor that are converted at once


@lru_cache
def own_digest() -> str:
    """Returns the digest of qfx itself: of its Python sources and of its compiled files."""
    files = [*sorted(Path(__file__).parents[1].rglob("*.py")), FACE, LIBRARY]
    total = hashlib.sha256()
    for file in files:
        total.update(file.name.encode() + file.read_bytes())
    return total.hexdigest()


def digest_of(*parts: str | Tensor, dtype: torch.dtype | None = None) -> str:
    """Returns the SHA-256 of strings and of the values of tensors, in order, in hexadecimal.

    It is the same on every machine and does not depend on the devices and strides of the tensors.
    With `dtype`, to which the values are converted, it does not depend on their dtypes either.
    """
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            total.update(part.encode())
            continue
        for values in _in_order(part, dtype):
            size = values.numel() * values.element_size()
            total.update((ctypes.c_char * size).from_address(values.data_ptr()))
    return total.hexdigest()


def _in_order(tensor: Tensor, dtype: torch.dtype | None) -> Iterator[Tensor]:
    """Yields all elements of a tensor in order, contiguous on the CPU, some rows at a time."""
    rows = tensor.detach().reshape(tensor.shape or (1,))
    if not rows.numel():
        return
    for some in rows.split(max(_AT_ONCE * len(rows) // rows.numel(), 1)):
        yield some.to("cpu", dtype or some.dtype).resolve_conj().resolve_neg().contiguous()
