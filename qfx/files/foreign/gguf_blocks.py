"""Reads tensors of GGUF files, as integers with scales or as floats, a few rows at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from qfx.files.foreign.gguf_table import Block, gguf
from qfx.files.foreign.weight import ForeignGrid, ForeignWeight
from qfx.files.tensor_file import on_own_pages
from qfx.io.errors import UserError, printable

GROUP = 32
_AT_ONCE = 2**20  # bytes of the file that are read at once
FLOATS = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64,
}  # fmt: skip


class BlockFormat(NamedTuple):
    """The format of a block of 32 elements: a scale and possibly a minimum, both float16, and bytes
    that `codes_of` converts to int8."""

    grid: ForeignGrid
    codes_of: Callable[[Tensor], Tensor]


def _nibbles(raw: Tensor) -> Tensor:
    """Unpacks uint8 [B, 16] to [B, 32]: first the low halves of all bytes, then the high halves."""
    return torch.cat([raw & 15, raw >> 4], 1)


def _four(raw: Tensor) -> Tensor:
    return _nibbles(raw).view(torch.int8).sub_(8)


def _five(raw: Tensor) -> Tensor:
    """Unpacks 5-bit integers: four bytes contain their highest bits, 16 bytes their low four
    bits."""
    fifth = (raw[:, :4, None] >> torch.arange(8, dtype=torch.uint8, device=raw.device)) & 1
    return (_nibbles(raw[:, 4:]) | fifth.reshape(-1, GROUP) << 4).view(torch.int8).sub_(16)


_grid = partial(ForeignGrid, group=GROUP, half=torch.float16)
KINDS = {
    "Q8_0": BlockFormat(_grid(8), lambda raw: raw.view(torch.int8)),
    "Q4_0": BlockFormat(_grid(4, signs=True), _four),
    "Q4_1": BlockFormat(_grid(4, minimum=True), _four),
    "Q5_0": BlockFormat(_grid(5, signs=True), _five),
    "Q5_1": BlockFormat(_grid(5, minimum=True), _five),
}


def weight_at(path: Path, block: Block, places: Tensor | None) -> ForeignWeight:
    """Reads a quantized tensor, of a kind in KINDS, without dequantizing it. `places`: the row of
    the result for each row of the file, None if these are the same."""
    grid, codes_of = KINDS[block.kind]
    n, k = prod(block.shape[:-1]), block.shape[-1]
    codes = on_own_pages((n, k), torch.int8)
    scale, minimum = (codes.new_empty(n, k // GROUP, dtype=torch.float16) for _ in range(2))
    for first, raw in _rows(path, block, n):
        each = raw.reshape(-1, raw.shape[1] // (k // GROUP)) if k else raw
        rows = slice(first, first + len(raw))
        to = rows if places is None else places[rows]
        head = each[:, : 4 if grid.minimum else 2].contiguous().view(torch.float16)
        scale[to] = head[:, 0].reshape(-1, k // GROUP)
        if grid.minimum:
            minimum[to] = head[:, 1].reshape(-1, k // GROUP)
        codes[to] = codes_of(each[:, 2 * head.shape[1] :].contiguous()).reshape(-1, k)
    return ForeignWeight(codes, scale, grid, None, minimum if grid.minimum else None)


def floats_at(path: Path, block: Block, places: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Reads a tensor of any kind that the package gguf can dequantize, as floats of `dtype`.
    `places`: the row of the result for each row of the file, None if these are the same."""
    n = prod(block.shape[:-1])
    found = on_own_pages((n, block.shape[-1] if block.shape else 1), dtype)
    for first, raw in _rows(path, block, n):
        rows = slice(first, first + len(raw))
        found[rows if places is None else places[rows]] = _floats(raw, block.kind, path).to(dtype)
    return found.reshape(block.shape)


def _floats(raw: Tensor, kind: str, path: Path) -> Tensor:
    if kind in FLOATS:
        return raw.view(FLOATS[kind])
    library = gguf()
    numbers = library.GGMLQuantizationType[kind]
    try:
        with warnings.catch_warnings():  # numpy warns if scales overflow
            warnings.simplefilter("ignore", RuntimeWarning)
            return torch.from_numpy(library.dequantize(raw.numpy(), numbers))
    except NotImplementedError:
        raise UserError(
            f"{printable(str(path))}: the installed gguf cannot dequantize {kind}"
        ) from None


def _rows(path: Path, block: Block, n: int) -> Iterator[tuple[int, Tensor]]:
    """Yields the tensor's `n` rows as bytes, uint8 [rows, bytes of a row], about 1 MiB at a time,
    each with the index of its first row."""
    width = block.size // max(n, 1)
    if not block.size:
        return
    step = max(1, _AT_ONCE // width)
    with path.open("rb") as file:
        file.seek(block.begin)
        for first in range(0, n, step):
            raw = bytearray(width * min(step, n - first))
            if file.readinto(raw) != len(raw):
                raise UserError(f"{printable(str(path))} became shorter as it was read")
            yield first, torch.frombuffer(raw, dtype=torch.uint8).reshape(-1, width)
