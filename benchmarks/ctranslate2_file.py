"""Reader of the tensors of a `model.bin` of CTranslate2 that does not need CTranslate2.

The file is little endian: version, name and revision of the model's kind, then for each tensor its
name, rank, sizes, number of the type, bytes and data, and finally more names of tensors. A name is
its length including the final zero, the text and that zero.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

VERSION = 6
TYPES = dict(
    enumerate((torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16))
)


def tensors(data: bytes) -> dict[str, Tensor]:
    """Returns every tensor by every name it has, in the dtype of the file.

    Raises ValueError for another version of the format, and if the file does not end after its
    tensors.
    """
    reader = _Reader(data)
    if (version := reader.number("I")) != VERSION:
        raise ValueError(f"model.bin has version {version} of its format, {VERSION} is known.")
    reader.text(), reader.number("I")  # the kind of model and its revision
    found = dict(reader.tensor() for _ in range(reader.number("I")))
    for _ in range(reader.number("I")):
        alias, name = reader.text(), reader.text()
        found[alias] = found[name]
    if reader.at != len(data):
        raise ValueError(f"model.bin has {len(data)} bytes, its tensors end at {reader.at}.")
    return found


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self) -> str:
        return self.take(self.number("H"))[:-1].decode()

    def tensor(self) -> tuple[str, Tensor]:
        name, rank = self.text(), self.number("B")
        shape = [self.number("I") for _ in range(rank)]
        dtype = TYPES[self.number("B")]
        flat = torch.frombuffer(bytearray(self.take(self.number("I"))), dtype=dtype)
        return name, flat.reshape(shape)
