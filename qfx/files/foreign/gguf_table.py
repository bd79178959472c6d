"""Reads the header of a GGUF file: its fields, and the position of each tensor.

Everything is checked against the size of the file before a tensor is read, since the package gguf
does not check what it reads.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from qfx.io.errors import UserError, printable

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_SCALARS = "BbHhIif?*#Qqd"  # struct's letter for each GGUF type; * is a string, # an array
_TEXT, _ARRAY = _SCALARS.index("*"), _SCALARS.index("#")
_LONGEST = 2**16  # largest length of a name in bytes
_KEPT = 4096  # largest number of elements of an array that is kept
_MOST_AXES = 4


class Block(NamedTuple):
    """A tensor in a file: its kind of quantization, its shape with the rows first, and the position
    and size of its data in bytes."""

    kind: str
    shape: tuple[int, ...]
    begin: int
    size: int


class GgufTable(NamedTuple):
    """The header of a GGUF file. `fields`: its numbers, strings and short arrays. `tensors`: by
    name, in the order of the file."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, Block]


def gguf() -> Any:
    try:
        import gguf
    except ImportError:
        raise ImportError(
            'GGUF files need the package gguf: pip install "qfx[gguf]" brings it'
        ) from None
    return gguf


def gguf_table_of(path: Path) -> GgufTable:
    """Reads the header of a GGUF file. Raises UserError, which names the file and what is wrong, or
    OSError."""
    with path.open("rb") as file:
        return _HeaderReader(file, path, path.stat().st_size).table()


class _HeaderReader:
    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self.file, self.path, self.size = file, path, size
        self.at = printable(str(path))

    def table(self) -> GgufTable:
        if self.bytes(4, "its first bytes") != MAGIC:
            raise UserError(f"{self.at} is no GGUF file")
        self.check_version(self.number("I"))
        tensors, fields = self.number("Q"), self.number("Q")
        known: dict[str, Any] = {}
        for _ in range(fields):
            name = self.text("the name of a field", _LONGEST)
            value = self.value(self.number("I"), name)
            if name in known:
                raise UserError(f"{self.at} has the field {printable(name)} twice")
            known[name] = value
        raw = [self.tensor() for _ in self.counted(tensors)]
        return GgufTable(self.path, known, self.placed(raw, _alignment(known, self.at)))

    def check_version(self, version: int) -> None:
        if version and version & 0xFFFF == 0:
            raise UserError(f"{self.at} is a big-endian GGUF file, which qfx.load does not read")
        if version not in VERSIONS:
            raise UserError(f"{self.at} is GGUF of version {version}, and 2 and 3 are read")

    def counted(self, count: int) -> range:
        """Returns range(count). Raises UserError if the file is too small for `count` tensors,
        which take at least 24 bytes each, so that a wrong count cannot cause a very long loop."""
        if count * 24 > self.size:
            raise UserError(f"{self.at} is cut off: it has {self.size} bytes for {count} tensors")
        return range(count)

    def bytes(self, count: int, what: str) -> bytes:
        left = self.size - self.file.tell()
        if count > left:
            raise UserError(
                f"{self.at} is cut off: {what} takes {count} bytes, and {max(left, 0)} are left"
            )
        found = self.file.read(count)
        if len(found) != count:
            raise UserError(f"{self.at} became shorter as it was read")
        return found

    def number(self, letter: str) -> Any:
        return struct.unpack(f"<{letter}", self.bytes(struct.calcsize(f"<{letter}"), "a number"))[0]

    def text(self, what: str, longest: int | None = None) -> str:
        length = self.number("Q")
        if longest is not None and length > longest:
            raise UserError(f"{self.at}: {what} has {length} bytes, and at most {longest} are read")
        try:
            return self.bytes(length, what).decode("utf-8")
        except UnicodeDecodeError as why:
            raise UserError(f"{self.at}: {what} is no text: {why}") from None

    def skip(self, count: int, what: str) -> None:
        left = self.size - self.file.tell()
        if count > left:
            raise UserError(
                f"{self.at} is cut off: {what} takes {count} bytes, and {max(left, 0)} are left"
            )
        self.file.seek(count, 1)

    def value(self, kind: int, name: str) -> Any:
        what = f"the field {printable(name)}"
        if kind == _TEXT:
            return self.text(what)
        if kind == _ARRAY:
            return self.array(what)
        if kind >= len(_SCALARS):
            raise UserError(f"{self.at}: {what} is of type {kind}, which GGUF does not have")
        return self.number(_SCALARS[kind])

    def array(self, what: str) -> tuple[Any, ...] | None:
        kind, count = self.number("I"), self.number("Q")
        if kind >= len(_SCALARS) or kind == _ARRAY:
            raise UserError(f"{self.at}: {what} is an array of type {kind}, which is not read")
        if kind == _TEXT:
            if count * 8 > self.size:
                raise UserError(f"{self.at} is cut off: {what} has {count} strings")
            for _ in range(count):
                self.skip(self.number("Q"), what)
            return None
        each = struct.calcsize(f"<{_SCALARS[kind]}")
        if count > _KEPT:
            self.skip(count * each, what)
            return None
        return struct.unpack(f"<{count}{_SCALARS[kind]}", self.bytes(count * each, what))

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.text("the name of a tensor", _LONGEST)
        axes = self.number("I")
        if axes > _MOST_AXES:
            raise UserError(f"{self.at}: {printable(name)} has {axes} axes, and GGUF at most 4")
        sizes = tuple(self.number("Q") for _ in range(axes))
        return name, sizes[::-1], self.number("I"), self.number("Q")

    def placed(self, raw: list[Any], alignment: int) -> dict[str, Block]:
        begin = -(-self.file.tell() // alignment) * alignment
        found: dict[str, Block] = {}
        for name, shape, number, offset in raw:
            if name in found:
                raise UserError(f"{self.at} has the tensor {printable(name)} twice")
            found[name] = self.block(name, shape, number, begin + offset)
        ends = sorted((b.begin, b.begin + b.size, name) for name, b in found.items() if b.size)
        for (_, end, one), (start, _, other) in pairwise(ends):
            if start < end:
                names = f"{printable(one)} and {printable(other)}"
                raise UserError(f"{self.at}: {names} overlap")
        return found

    def block(self, name: str, shape: tuple[int, ...], number: int, begin: int) -> Block:
        here = f"{self.at}: {printable(name)}"
        library = gguf()
        try:
            kind = library.GGMLQuantizationType(number)
        except ValueError:
            raise UserError(
                f"{here} is of type {number}, of which the installed gguf knows nothing"
            ) from None
        elements, size = library.GGML_QUANT_SIZES[kind]
        if (shape[-1] if shape else 1) % elements:
            raise UserError(
                f"{here} is {kind.name}, blocks of {elements}, and has a shape of {list(shape)}"
            )
        whole = prod(shape) // elements * size
        if any(axis >= 2**63 for axis in shape) or begin + whole > self.size:
            raise UserError(
                f"{here} is {kind.name} {list(shape)} at byte {begin}, {whole} bytes, and the file "
                f"has {self.size}"
            )
        return Block(kind.name, shape, begin, whole)


def _alignment(fields: Mapping[str, Any], at: str) -> int:
    found = fields.get("general.alignment", 32)
    if type(found) is not int or not 0 < found <= 2**20 or found & (found - 1):
        raise UserError(f"{at}: the alignment {printable(repr(found))} is no power of two")
    return found
