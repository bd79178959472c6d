"""Offloading: moves the values of a tensor to a file, so that it takes no memory until it is read.

Nothing is lost: reading a tensor loads its pages from the file, and writing to it creates private
pages. The file has no name and is deleted with the tensor.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qfx.host.tensors import owners, storage_id, weak_storage
from qfx.io.pages import drop, is_of_a_file

LEAST = 2**16  # bytes; offloading smaller tensors saves nothing
_OFFLOADED: dict[tuple[int | None, int], Any] = {}  # by storage and place in it


def is_offloaded(tensor: Tensor) -> bool:
    """Whether the values of this tensor are in a file and its memory was freed."""
    return bool(_OFFLOADED) and _place(tensor) in _OFFLOADED


def _place(tensor: Tensor) -> tuple[int | None, int]:
    return storage_id(tensor), int(tensor.storage_offset())


def offload(tensor: Tensor) -> str:
    """Moves the values of a tensor to a file. Returns '' if it did, otherwise why it did not.

    For a tensor that maps a file and was not written, such as one of a model that was loaded by
    mapping, only its pages are dropped. Other values are written to a file in
    `tempfile.gettempdir()` (TMPDIR), and the tensor gets a storage that maps it. This requires that
    the tensor is the only owner of its storage and covers all of it: other owners would keep the
    memory, and would no longer see writes to the tensor. Raises OSError if there is no space, if
    that folder is in memory, or if the system cannot do it.
    """
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return "it is not in the memory of the CPU"
    storage, size = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
    if size < LEAST:
        return f"it has {size} bytes, fewer than {LEAST}"
    if not _dense(tensor):
        return "it has gaps, or shows elements twice"
    if not is_of_a_file(tensor.data_ptr(), size):
        if storage.nbytes() != size:
            return f"it is a view of {size} of the {storage.nbytes()} bytes of other memory"
        if (count := owners(tensor)) > 1:
            return f"{count} tensors share its memory"
        _move(tensor)
    drop(tensor.data_ptr(), size)
    for place in [place for place, storage in _OFFLOADED.items() if storage.expired()]:
        _OFFLOADED.pop(place, None)
    _OFFLOADED[_place(tensor)] = weak_storage(tensor)
    return ""


def drop_file_pages(tensor: Tensor) -> None:
    """Drops the pages of a tensor that maps a file and was not written; does nothing for others."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or not _dense(tensor):
        return
    size = tensor.numel() * tensor.element_size()
    with suppress(OSError):  # the system may not say which pages belong to a file
        if is_of_a_file(tensor.data_ptr(), size):
            drop(tensor.data_ptr(), size)


def _dense(tensor: Tensor) -> bool:
    """Whether the elements of the tensor are contiguous in memory, each once, in any order of
    axes."""
    order = sorted(range(tensor.dim()), key=lambda axis: (tensor.stride(axis), tensor.size(axis)))
    return tensor.permute(order[::-1]).is_contiguous()


def _move(tensor: Tensor) -> None:
    storage = tensor.untyped_storage()
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        mapped = tensor.new_empty(0).set_(_mapped(storage), 0, tensor.shape, tensor.stride())
        tensor.data = mapped


def _mapped(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    folder = tempfile.gettempdir()
    if kind := _kind_in_memory(folder):
        raise OSError(f"{folder} is in memory ({kind}): set TMPDIR to a folder on disk")
    with tempfile.NamedTemporaryFile(prefix="qfx-", dir=folder) as file:
        file.write((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()))
        file.flush()
        return torch.UntypedStorage.from_file(file.name, False, storage.nbytes())  # type: ignore


def _kind_in_memory(folder: str) -> str:
    """Returns the name of the file system of a folder if that keeps files in memory; otherwise
    ''."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    kinds = {words[words.index("-") + 1] for words in mounts if words[2] == number}
    return next(iter(kinds & {"tmpfs", "ramfs"}), "")
