"""Tensors of two values, such as the masks of dropout, as one bit for each element."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_BYTE = 8  # flags in a byte
_GATHER = 0x0102040810204080  # times eight bytes of 0 or 1: their bits, in the highest byte


class PackedFlags:
    """A tensor whose elements are all 0 or one other value, packed without a loss."""

    def __init__(self, tensor: Tensor, other: Tensor) -> None:
        """`other`: the other value, with no axes."""
        self.shape, self.other = tensor.shape, other
        flags = (tensor != 0).view(torch.uint8).ravel()
        padding = -flags.numel() % _BYTE
        self.bits = _packed(torch.cat([flags, flags.new_zeros(padding)]) if padding else flags)

    @staticmethod
    def of(tensor: Tensor) -> PackedFlags | None:
        """Packs a tensor; None if it has other values. Reads it twice."""
        if tensor.dtype == torch.bool:
            return PackedFlags(tensor, tensor.new_ones(()))
        other = tensor.amax()
        two = ((tensor == 0) | (tensor == other)).all()
        return PackedFlags(tensor, other) if two else None

    def values(self) -> Tensor:
        flags = _flags_of_bytes(self.bits.device)[self.bits.int()].view(-1)
        flags = flags[: self.shape.numel()].reshape(self.shape)
        return torch.where(flags != 0, self.other, torch.zeros_like(self.other))


def _packed(flags: Tensor) -> Tensor:
    """Returns a byte for each eight bytes, which are 0 or 1."""
    return ((flags.view(torch.int64) * _GATHER) >> 56).to(torch.uint8)


@cache
def _flags_of_bytes(device: torch.device) -> Tensor:
    """Returns the eight flags of each byte, [256, 8]."""
    places = torch.arange(_BYTE, dtype=torch.int64, device=device)
    rows = ((torch.arange(256, dtype=torch.int64, device=device)[:, None] >> places) & 1).to(
        torch.uint8
    )
    table = torch.empty_like(rows)
    table[_packed(rows.ravel()).long()] = rows
    return table
