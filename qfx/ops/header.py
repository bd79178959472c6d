"""Headers of packed weights on the CPU: fields, a checksum of the contents, and one of the header.

The header of pack_weight has 128 bytes, little endian, version 4:

    b"QFXW", u32 version, u32 bits, u32 shift (0 none, 1 zero points, 2 minimums),
    u32 scales (0 float32, 1 bfloat16, 2 float16), u32 max |code| (of 8 bits, else 0),
    i64 N, i64 K, i64 group, i64 scale_group, u64 checksum of the contents after the header,
    7 x u64 0, u64 checksum of the header, computed with 0 in this place
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

MAGIC, VERSION, HEADER_BYTES = b"QFXW", 4, 128
NONE, ZERO_POINTS, MINIMUMS = 0, 1, 2  # shifts
PANEL = 32  # consecutive rows of a weight that are stored together
_SCALES = (torch.float32, torch.bfloat16, torch.float16)
_FIELDS = "<4sIIIIIqqqq"


class Header(NamedTuple):
    """The fields of a packed weight's header. `group` and `scale_group`: as in a `Layout`."""

    n: int
    k: int
    bits: int = 8
    shift: int = NONE
    scales: torch.dtype = torch.float32
    magnitude: int = 0
    group: int = 0
    scale_group: int = 0

    def before(self, contents: Tensor) -> Tensor:
        """Returns the packed weight, int8: this header and then the contents."""
        fields = (self.bits, self.shift, _SCALES.index(self.scales), self.magnitude, *self[:2])
        groups = (self.group, self.scale_group)
        packed = struct.pack(_FIELDS, MAGIC, VERSION, *fields, *groups)
        return with_header(packed, HEADER_BYTES, contents)


def header_of(weight: Tensor) -> Header:
    """Reads the header of a packed weight, which must not be on the meta device."""
    raw = bytes(weight[: struct.calcsize(_FIELDS)].view(torch.uint8).tolist())
    _, _, bits, shift, scales, magnitude, *sizes = struct.unpack(_FIELDS, raw)
    n, k, group, scale_group = sizes
    return Header(n, k, bits, shift, _SCALES[scales], magnitude, group, scale_group)


def with_header(fields: bytes, size: int, contents: Tensor) -> Tensor:
    """Returns the contents, int8, after a header of `size` bytes: the fields, the checksum of the
    contents, zeros, and the header's own checksum."""
    head = fields + struct.pack("<Q", checksum(contents))
    head += bytes(size - 8 - len(head))
    header = head + struct.pack("<Q", checksum(_bytes(head + bytes(8))))
    return torch.cat([_bytes(header).to(contents.device), contents])


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.int8)


def checksum(t: Tensor) -> int:
    """Returns sum_{r, l} (2 r + 1) (2 l + 1) word[r, l] mod 2^64 over rows of four 64-bit words of
    t, int8 [*]."""
    words = t.view(torch.int64).reshape(-1, 4)
    numbers = [torch.arange(n, dtype=torch.int64, device=t.device) for n in words.shape]
    odd = [2 * each + 1 for each in numbers]
    return int((words * odd[0][:, None] * odd[1]).sum()) % 2**64
