"""Weights of 4- and 5-bit codes in the layout of the kernels: a header (qfx/ops/header.py), then P
= ceil(N / 32) panels of G = ceil(K / group) groups (csrc/cpu/kernels/tables/lowbit.h):

    each panel, of columns n < 32: padded to 64 bytes, by the header's shift,
        nothing, zero point uint8 [G][32] as u, or minimum uint16 [G][32]
    and for each group, u = code + 2^(bits - 1):
        scale uint16 [32]                     bfloat16 or float16
        nibbles uint8 [group / 8][32][4]      low  u & 15 of k = 8 i + j, high of k = 8 i + 4 + j
        fifth uint8 [group / 8][2][32 * 4 / 8]  5 bits: u >> 4 of k = 8 i + 4 h + j at bit 4 n + j

Scales and minimums are of the header's dtype. Elements beyond N and K equal the zero point.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qfx.host.tensors import has_values
from qfx.ops.header import (
    HEADER_BYTES,
    MINIMUMS,
    NONE,
    PANEL,
    ZERO_POINTS,
    Header,
    header_of,
)

GROUPS = (32, 64, 128)  # numbers of elements of K that may share a scale


class LowbitSizes(NamedTuple):
    """The sizes of a packed weight: panels, groups, and the bytes of a group, of what precedes the
    groups of a panel, and of a panel."""

    panels: int
    groups: int
    block: int
    front: int
    panel: int


def sizes_of(n: int, k: int, bits: int, group: int, shift: int) -> LowbitSizes:
    groups = -(-k // group)
    block = PANEL * (2 + group // 2 + (group // 8 if bits == 5 else 0))
    front = -(-groups * PANEL * shift // 64) * 64
    return LowbitSizes(-(-n // PANEL), groups, block, front, front + groups * block)


def lowbit_size(n: int, k: int, bits: int, group: int, shift: int = NONE) -> int:
    """Returns the bytes of a packed weight [n, k]. `shift`: NONE, ZERO_POINTS or MINIMUMS."""
    sizes = sizes_of(n, k, bits, group, shift)
    return HEADER_BYTES + sizes.panels * sizes.panel


def half_type(values: Tensor) -> torch.dtype:
    """Returns bfloat16 if it holds all values exactly, else float16. Raises ValueError if neither
    does."""
    for dtype in (torch.bfloat16, torch.float16):
        if bool((values.to(dtype).float().view(torch.int32) == values.view(torch.int32)).all()):
            return dtype
    raise ValueError("values that are neither all bfloat16 nor all float16: round them first")


def pack_lowbit(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    minimum: Tensor | None,
    bits: int,
    group: int,
) -> Tensor:
    """Packs codes int8 [N, K] of 4 or 5 bits, scale float32 [N, G], and zero_point int32 [N, G] or
    minimum float32 [N, G] or neither into the layout above. Equation (E4) defines the float that a
    code represents.

    Scales and minimums must be exact in one of bfloat16 and float16.
    """
    n, k = codes.shape
    shift = shift_of(zero_point, minimum)
    half = half_type_of(scale, minimum)
    sizes, middle = sizes_of(n, k, bits, group, shift), 1 << (bits - 1)
    rows = (0, sizes.panels * PANEL - n)
    padding = codes.new_full(
        (n, sizes.groups), 0 if shift == MINIMUMS else middle, dtype=torch.int32
    )
    zero = padding if zero_point is None else zero_point + middle
    zero = F.pad(zero, (0, 0, *rows), value=0 if shift == MINIMUMS else middle)
    u = F.pad(codes.int() + middle, (0, sizes.groups * group - k, *rows), value=-1)
    u = u.reshape(sizes.panels, PANEL, sizes.groups, group)
    u = torch.where(u < 0, zero.reshape(sizes.panels, PANEL, sizes.groups, 1), u)
    # [P, G, K / 8, half, column, 4]
    u = u.reshape(*u.shape[:3], group // 8, 2, 4).permute(0, 2, 3, 4, 1, 5)
    nibbles = (u[:, :, :, 0] & 15) | (u[:, :, :, 1] & 15) << 4
    parts = [_half_by_panel(scale, sizes, half), nibbles.to(torch.uint8).flatten(2)]
    if bits == 5:
        fifths = (u >> 4).reshape(*u.shape[:4], PANEL // 2, 8) << _places(u)
        parts.append(fifths.sum(-1).to(torch.uint8).flatten(2))
    front = _front(zero, minimum, sizes, shift, half)
    contents = torch.cat([front, torch.cat(parts, -1).flatten(1)], 1).flatten()
    header = Header(n, k, bits, shift, half, 0, group, group)
    return header.before(contents.contiguous().view(torch.int8))


def shift_of(zero_point: Tensor | None, minimum: Tensor | None) -> int:
    """Returns what shifts the codes: NONE, ZERO_POINTS or MINIMUMS, as the header says it."""
    return ZERO_POINTS if zero_point is not None else MINIMUMS if minimum is not None else NONE


def _places(like: Tensor) -> Tensor:
    """Returns 0 to 7, the positions of the bits of a byte: int64 [8]."""
    return torch.arange(8, dtype=torch.int64, device=like.device)


def half_type_of(scale: Tensor, minimum: Tensor | None) -> torch.dtype:
    """Returns the dtype that holds both exactly. Raises ValueError if there is none."""
    found = {half_type(scale)} | ({half_type(minimum)} if minimum is not None else set())
    if len(found) == 2:  # float16 holds both exactly, or no dtype does
        for values in (scale, minimum):
            assert values is not None
            if not bool((values.half().float() == values).all()):
                raise ValueError("scale and minimum are not of one type")
        return torch.float16
    return found.pop()


def _half_by_panel(values: Tensor, sizes: LowbitSizes, half: torch.dtype) -> Tensor:
    """Converts float32 [N, G] to the bytes of `half`, [P, G, 64]."""
    found = _by_panel(values, sizes, half).flatten().view(torch.uint8)
    return found.reshape(sizes.panels, sizes.groups, 2 * PANEL)


def _by_panel(values: Tensor, sizes: LowbitSizes, dtype: torch.dtype) -> Tensor:
    """Converts [N, G] to [P, G, 32]."""
    padded = F.pad(values, (0, 0, 0, sizes.panels * PANEL - values.shape[0]))
    by_panel = padded.reshape(sizes.panels, PANEL, sizes.groups)
    return by_panel.transpose(1, 2).to(dtype).contiguous()


def _front(
    zero: Tensor, minimum: Tensor | None, sizes: LowbitSizes, shift: int, half: torch.dtype
) -> Tensor:
    empty = zero.new_empty(sizes.panels, 0, dtype=torch.uint8)
    if shift == ZERO_POINTS:
        empty = _by_panel(zero, sizes, torch.uint8).flatten(1)
    elif minimum is not None:
        empty = _half_by_panel(minimum, sizes, half).flatten(1)
    return F.pad(empty, (0, sizes.front - empty.shape[1]))


def unpack_lowbit(packed: Tensor, n: int, k: int, group: int) -> tuple[Tensor, ...]:
    """Inverts pack_lowbit: returns codes int8 [N, K], scale float32, zero_point int32 and minimum
    float32 [N, G]. With minimums, the zero points are all -2^(bits - 1). Missing values are 0."""
    header = header_of(packed)
    bits, shift, half = header.bits, header.shift, header.scales
    sizes, middle = sizes_of(n, k, bits, group, shift), 1 << (bits - 1)
    panels = packed[HEADER_BYTES:].view(torch.uint8).reshape(sizes.panels, sizes.panel)
    blocks = panels[:, sizes.front :].reshape(sizes.panels, sizes.groups, sizes.block)
    scale = _of_halves(blocks[:, :, : 2 * PANEL], half, sizes, n)
    ends = (2 * PANEL, 2 * PANEL + PANEL * group // 2)
    nibbles = blocks[:, :, ends[0] : ends[1]].reshape(*blocks.shape[:2], group // 8, 1, PANEL, 4)
    u = torch.cat([nibbles & 15, nibbles >> 4], 3).int()
    if bits == 5:
        fifth = blocks[:, :, ends[1] :].reshape(*u.shape[:4], PANEL // 2, 1).int()
        u |= (fifth >> _places(u) & 1).reshape(u.shape) << 4
    u = u.permute(0, 4, 1, 2, 3, 5).reshape(sizes.panels * PANEL, sizes.groups * group)
    codes = (u[:n, :k] - middle).to(torch.int8).contiguous()
    front = panels[:, : sizes.groups * PANEL * shift]
    zero, minimum = scale.new_zeros(2, n, sizes.groups)
    if shift == ZERO_POINTS:
        zero = _of_panels(front.reshape(sizes.panels, sizes.groups, PANEL), n) - middle
    elif shift == MINIMUMS:
        zero = torch.full_like(zero, -middle)
        minimum = _of_halves(front, half, sizes, n)
    return codes, scale, zero.int(), minimum


def _of_halves(content: Tensor, half: torch.dtype, sizes: LowbitSizes, n: int) -> Tensor:
    """Inverts _half_by_panel: returns float32 [N, G]."""
    values = content.flatten().view(half)
    return _of_panels(values.reshape(sizes.panels, sizes.groups, PANEL), n)


def _of_panels(values: Tensor, n: int) -> Tensor:
    """Converts [P, G, 32] to float32 [N, G]."""
    panels, groups, columns = values.shape
    return values.float().transpose(1, 2).reshape(panels * columns, groups)[:n].contiguous()


def has_minimums(packed: Tensor) -> bool:
    """Whether the header says that there are minimums; False for a tensor without values."""
    return has_values(packed) and header_of(packed).shift == MINIMUMS
