"""pack_weight, unpack_weight, weight_scale, cut_weight: a quantized weight as one tensor, as the
matmul kernels read it. This module contains their references and fake implementations.

The layouts on the CPU are described in qfx/ops/int8_packing.py and qfx/ops/lowbit_packing.py. On
CUDA a weight of 8 bits has no header, because it could not be read without waiting for the GPU.
Sizes determine everything (csrc/cuda/gemm/layout.h):

    colsum int32 [N4], codes int8 [N, Kp], zero padded     N4 = N up to 4, Kp = K up to 16
    group sums int32 [N, G], zeros int8 [group / 64]       if group > 0
    padding to 16 bytes, scale float32 [N, S], zero point int32 [N, S] if there are any
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qfx.ops.header import MINIMUMS, ZERO_POINTS, header_of
from qfx.ops.int8_packing import K_MULTIPLE, int8_size, pack_int8, scales_of_rows, unpack_int8
from qfx.ops.layout import Layout
from qfx.ops.lowbit_packing import lowbit_size, pack_lowbit, shift_of, unpack_lowbit
from qfx.ops.registry import fake, no_gradient, reference

CUDA_COLUMNS, CUDA_PITCH = 4, 16


def _layout(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    minimum: Tensor | None,
    bits: int,
    group: int,
) -> Layout:
    """Returns the layout of a weight that is packed from these values."""
    (n, k), by_group = codes.shape, bits != 8
    if group and scale.dim() == 2:
        by_group = by_group or scale.shape[1] == -(-k // group)
    shift = int(zero_point is not None or minimum is not None)
    return Layout(n, bits, group, group if by_group else 0, shift)


@reference
def pack_weight(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    minimum: Tensor | None = None,
    bits: int = 8,
    group: int = 0,
) -> Tensor:
    """Packs codes int8 [N, K], scale float32 [N], [N, 1] or [N, G], zero_point int32 of the same
    shape, or minimum float32 [N, G] -> the packed weight, int8 [bytes].

    `group`: elements of K whose products are summed separately, a multiple of 32, on CUDA of 64; 0
    for all. `bits`: 8; or 4 or 5, only in groups of 32, 64 or 128, whose scales and minimums are
    values of bfloat16 or float16. Equations (Q5) and (Q14) define the float that a code represents.
    """
    if bits != 8:
        return pack_lowbit(codes, scale, zero_point, minimum, bits, group)
    layout = _layout(codes, scale, zero_point, None, bits, group)
    return pack_int8(codes, *_by_row(scale, zero_point), layout)


def _by_row(scale: Tensor, zero_point: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Gives scale and zero point the shape [N, S]."""
    if scale.dim() == 2:
        return scale, zero_point
    return scale[:, None], None if zero_point is None else zero_point[:, None]


@fake("pack_weight")
def _(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    minimum: Tensor | None = None,
    bits: int = 8,
    group: int = 0,
) -> Tensor:
    layout = _layout(codes, scale, zero_point, minimum, bits, group)
    return _empty(codes, layout, codes.shape[1], shift_of(zero_point, minimum))


def _empty(like: Tensor, layout: Layout, k: Any, shift: int) -> Tensor:
    """Returns a packed weight without values. `shift`: as in its header."""
    if layout.low_bit:
        size = lowbit_size(layout.n, k, layout.bits, layout.group, shift)
    else:
        size = (cuda_packed_size if like.device.type == "cuda" else int8_size)(layout, k)
    return like.new_empty(size, dtype=torch.int8)


def packed_size(layout: Layout, k: int, shift: int = 0) -> int:
    """Returns the number of bytes of a packed weight with k columns on the CPU. `shift`: as in its
    header."""
    if layout.low_bit:
        return lowbit_size(layout.n, k, layout.bits, layout.group, shift)
    return int(int8_size(layout, k))


# --- on CUDA ---


def cuda_packed_size(layout: Layout, k: Any) -> Any:
    """Returns the number of bytes of a packed weight of 8 bits with k columns on CUDA."""
    n, group = layout.n, layout.group
    size = 4 * (-(-n // CUDA_COLUMNS) * CUDA_COLUMNS) + n * (-(-k // CUDA_PITCH) * CUDA_PITCH)
    if group:
        group = _longest(group, k)
        size = size + 4 * n * -(-k // group) + group // K_MULTIPLE
    return -(-size // 16) * 16 + 4 * n * layout.scales(k) * (1 + layout.shift)


def _longest(group: int, k: Any) -> Any:
    """Returns the group, limited to K rounded up: a longer group means the same."""
    return min(group, max(-(-k // K_MULTIPLE) * K_MULTIPLE, K_MULTIPLE))


def cuda_pack_weight(
    codes: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    minimum: Tensor | None = None,
    bits: int = 8,
    group: int = 0,
) -> Tensor:
    """Packs in the layout of pack_weight on CUDA, from tensors on any device."""
    if bits != 8:
        return pack_lowbit(codes, scale, zero_point, minimum, bits, group)
    (n, k), (scale, zero_point) = codes.shape, _by_row(scale, zero_point)
    colsum = F.pad(codes.sum(1, dtype=torch.int32), (0, -n % CUDA_COLUMNS))
    parts = [_bytes(colsum), F.pad(codes, (0, -k % CUDA_PITCH)).reshape(-1)]
    if group:
        group = _longest(group, k)
        sums = [codes[:, i : i + group].sum(1, dtype=torch.int32) for i in range(0, k, group)]
        parts += [_bytes(torch.stack(sums, 1))] if sums else []
        parts += [codes.new_zeros(group // K_MULTIPLE)]
    parts += [codes.new_zeros(-sum(map(len, parts)) % 16), _bytes(scale)]
    return torch.cat(parts if zero_point is None else [*parts, _bytes(zero_point)])


def _bytes(values: Tensor) -> Tensor:
    return values.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.int8)


# --- and back ---


@reference
def unpack_weight(
    weight: Tensor, layout: Sequence[int], k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inverts pack_weight: returns codes int8 [N, K], scale float32, zero_point int32 and minimum
    float32 [N, S], where S = 1 if a row has one scale. Missing values are 0, but with minimums the
    zero points are -2^(bits - 1). (Q14)"""
    fields = Layout(*layout)
    if fields.low_bit:
        codes, scale, zero, minimum = unpack_lowbit(weight, fields.n, k, fields.group)
        return codes, scale, zero, minimum
    codes, scale, zero = unpack_int8(weight, fields, k)
    return codes, scale, zero, torch.zeros_like(scale)


@fake("unpack_weight")
def _(weight: Tensor, layout: Sequence[int], k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    fields = Layout(*layout)
    scale = weight.new_empty((fields.n, fields.scales(k)), dtype=torch.float32)
    zero = torch.empty_like(scale, dtype=torch.int32)
    return weight.new_empty((fields.n, k)), scale, zero, torch.empty_like(scale)


@reference
def weight_scale(weight: Tensor, n: int) -> Tensor:
    """Returns the scales, float32 [N], of a packed weight of 8 bits with one scale per row and no
    zero points."""
    return scales_of_rows(weight, n)


@fake("weight_scale")
def _(weight: Tensor, n: int) -> Tensor:
    return weight.new_empty(n, dtype=torch.float32)


# --- parts of a weight ---


@reference
def cut_weight(
    weight: Tensor,
    layout: Sequence[int],
    k: int,
    dim: int,
    begin: int,
    end: int,
    rotation: int = 0,
) -> Tensor:
    """Returns the packed weight of rows (dim 0) or columns (dim 1) begin..end of a packed one [N,
    K].

    Columns are cut between groups, and between the blocks of `rotation` in which K is rotated. The
    codes, scales and shifts do not change.
    """
    fields = Layout(*layout)
    codes, scale, zero_point, minimum = unpack_weight(weight, layout, k)
    shift = header_of(weight).shift
    values = [scale, zero_point if shift == ZERO_POINTS else None]
    values.append(minimum if shift == MINIMUMS else None)
    if dim == 0:
        codes = codes[begin:end]
        values = [None if v is None else v[begin:end] for v in values]
    else:
        codes = codes[:, begin:end]
        if size := fields.scale_group:
            kept = slice(-(-begin // size), -(-end // size))
            values = [None if v is None else v[:, kept] for v in values]
    return pack_weight(codes, *values, fields.bits, fields.group)  # type: ignore[arg-type]


@fake("cut_weight")
def _(
    weight: Tensor,
    layout: Sequence[int],
    k: int,
    dim: int,
    begin: int,
    end: int,
    rotation: int = 0,
) -> Tensor:
    fields, shift = Layout(*layout), 0
    if fields.low_bit and fields.shift:  # the size tells which kind of shift
        points = lowbit_size(fields.n, k, fields.bits, fields.group, ZERO_POINTS)
        shift = ZERO_POINTS if weight.numel() == points else MINIMUMS
    count = end - begin
    if dim == 0:
        return _empty(weight, fields._replace(n=count), k, shift)
    return _empty(weight, fields, count, shift)


no_gradient("pack_weight", "use qfx::linear_ste, as the qfx backend does by itself")
