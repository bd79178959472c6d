"""Reads and writes safetensors files: first the header, which names the tensors of the file with
their dtypes, shapes and offsets (here called the table), then the tensors in the order of their
offsets.

The package safetensors checks sizes, offsets and overflows in the header, and that the file is
complete. This module finds the other errors: a dtype that qfx does not read, a size that PyTorch
cannot represent, a bool that is neither 0 nor 1, a file that became shorter.

Tensors are read one after another into their own memory: the pages of a mapped file would count as
resident memory, in addition to the model made from it.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from ctypes import c_ubyte
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from qfx.io.errors import UserError, printable
from qfx.io.huge_pages import Room
from qfx.io.safe_read import first_bytes, missing_as_os_error, opened, parsed

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
METADATA = "__metadata__"
_LENGTH = 8  # bytes of the length at the beginning of a file


class TensorEntry(NamedTuple):
    """A tensor of a file: its dtype and shape, and its size in bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    size: int


class TensorIndex(NamedTuple):
    """The table of a file. `entries`: its tensors by name, in the order of their bytes. `head`: the
    number of bytes of the header, which precede those of the tensors."""

    path: Path
    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    head: int


def table_of(path: Path) -> TensorIndex:
    """Reads the table of a file. Raises UserError, which names the file and what is wrong, or
    OSError."""
    with open_table(path) as (_, table):
        return table


@contextmanager
def open_table(path: Path) -> Iterator[tuple[BinaryIO, TensorIndex]]:
    """Yields the open file and its table. Starts again if the file is replaced while it is checked.
    Raises the errors of `table_of`."""
    library = safetensors()
    at = printable(str(path))
    while True:
        with opened(path) as file:
            if known := _kind(first_bytes(file, 4)):
                raise UserError(f"{at} is {known}")
            try:
                with missing_as_os_error(path), library.safe_open(path, "pt") as checked:
                    metadata = dict(checked.metadata() or {})
            except library.SafetensorError as why:
                raise UserError(
                    f"{at} is no whole file of tensors: {printable(str(why))}"
                ) from None
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                yield file, _table(file, path, metadata)
                return


def _table(file: BinaryIO, path: Path, metadata: Mapping[str, str]) -> TensorIndex:
    at = printable(str(path))
    file.seek(0)
    length = int.from_bytes(file.read(_LENGTH), "little")
    text = file.read(length).decode("utf-8")  # as safetensors found it to be
    raw = parsed(text, f"{at} is no file of tensors")
    items = [(n, r) for n, r in raw.items() if n != METADATA]
    items.sort(key=lambda item: item[1]["data_offsets"])
    entries = {name: _entry(raw, f"{at}: {printable(name)}") for name, raw in items}
    return TensorIndex(path, entries, metadata, _LENGTH + length)


def _kind(magic: bytes) -> str:
    """Describes a file of another kind and how to read it; '' if the kind is not known."""
    if magic[:2] == b"PK":
        return (
            "a file of torch.save, which qfx.load does not read: quantize_ the model, "
            "model.load_state_dict(torch.load(path, weights_only=True)), and qfx.save writes it; "
            "of torchao: import torchao, qfx.load(torch.load(path, weights_only=True), skeleton)"
        )
    return ""


def _entry(raw: dict[str, Any], at: str) -> TensorEntry:
    if raw["dtype"] not in DTYPES:
        raise UserError(f"{at} is of type {raw['dtype']}, which this qfx does not read")
    begin, end = raw["data_offsets"]
    shape = tuple(raw["shape"])
    if any(size >= 2**63 for size in shape):  # possible without elements: safetensors checks others
        raise UserError(f"{at} has a shape of {list(shape)}")
    return TensorEntry(DTYPES[raw["dtype"]], shape, end - begin)


def tensors_together(table: TensorIndex) -> dict[str, Tensor]:
    """Reads all tensors of a file, by name, into one block of memory in the order of the file.
    Raises the errors of `tensors_of`."""
    room = Room.of(entry.size for entry in table.entries.values())
    with table.path.open("rb") as file:
        file.seek(table.head)
        found = {}
        for name, entry in table.entries.items():
            found[name] = room.empty(entry.shape, entry.dtype)
            _read_into(found[name], file, table.path, name)
    return found


def tensors_of(
    table: TensorIndex,
    file: BinaryIO,
    on_bytes: Callable[[bytes | memoryview], None],
    passing: Callable[[str], bool],
) -> Iterator[tuple[str, Tensor]]:
    """Yields names and tensors of an open file, in its order, each with its own memory.

    `passing(name)`: whether this tensor is needed only for a short time. Such a tensor gets memory
    pages of its own, which are freed with it. `on_bytes`: called with all bytes of the file, to
    compute its digest. Raises UserError if the file has become shorter, or if a byte of a bool
    tensor is neither 0 nor 1.
    """
    file.seek(0)
    on_bytes(file.read(table.head))
    for name, entry in table.entries.items():
        if passing(name):
            tensor = on_own_pages(entry.shape, entry.dtype)
        else:
            tensor = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        memory = _read_into(tensor, file, table.path, name)
        on_bytes(memory)
        yield name, tensor
        del tensor, memory


def _read_into(tensor: Tensor, file: BinaryIO, path: Path, name: str) -> memoryview:
    memory = _memory_of(tensor)
    if file.readinto(memory) != memory.nbytes:  # type: ignore[attr-defined]
        raise UserError(f"{printable(str(path))}: it became shorter as it was read")
    if tensor.dtype == torch.bool and memory.tobytes().translate(None, b"\0\1"):
        raise UserError(f"{printable(str(path))}: {printable(name)} holds a byte that is no bool")
    return memory


def tensor_of(table: TensorIndex, name: str) -> Tensor:
    """Reads one tensor of a file, into memory pages of its own. Raises UserError if the file has
    become shorter."""
    entry, at = table.entries[name], table.head
    for before, each in table.entries.items():
        if before == name:
            break
        at += each.size
    tensor = on_own_pages(entry.shape, entry.dtype)
    with table.path.open("rb") as file:
        file.seek(at)
        _read_into(tensor, file, table.path, name)
    return tensor


def on_own_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns an uninitialized tensor on memory pages of its own, which are freed with it. malloc
    would keep freed pages, up to a third of a model's memory."""
    size = prod(shape) * dtype.itemsize
    if size < mmap.PAGESIZE:
        return torch.empty(shape, dtype=dtype, device="cpu")
    pages = mmap.mmap(-1, size, access=mmap.ACCESS_COPY)
    return torch.frombuffer(pages, dtype=dtype, count=prod(shape)).reshape(shape)


def _memory_of(tensor: Tensor) -> memoryview:
    """Returns the bytes of a dense CPU tensor without a copy. The tensor must outlive them."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu" and sys.byteorder == "little"
    size = tensor.numel() * tensor.element_size()
    return memoryview((c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def in_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of the tensors in the order in which they are written.

    Wide elements come first, so that each tensor is aligned. Then come large tensors, so that when
    a file is read, the last tensors need little memory in addition to the modules that are already
    loaded.
    """
    return sorted(tensors, key=lambda n: (-tensors[n].element_size(), -tensors[n].numel(), n))


def write_tensors(
    file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> str:
    """Writes a whole file; returns the SHA-256 of its bytes."""
    found = hashlib.sha256()
    for part in _parts(tensors, metadata):
        found.update(part)
        file.write(part)
    return found.hexdigest()


def _parts(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterable[Any]:
    names, table, end = in_order(tensors), {METADATA: dict(metadata)}, 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + prod(tensor.shape) * tensor.element_size()
        entry: Any = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape)}
        table[name] = entry | {"data_offsets": [begin, end]}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % _LENGTH)
    yield len(text).to_bytes(_LENGTH, "little") + text
    for name in names:
        plain = tensors[name].detach().cpu().resolve_conj().resolve_neg().contiguous()
        yield _memory_of(plain)


def safetensors() -> Any:
    try:
        import safetensors
    except ImportError:
        raise ImportError(
            "a saved model is made of safetensors files, which need the package safetensors: "
            'pip install "qfx[files]" brings it'
        ) from None
    return safetensors
