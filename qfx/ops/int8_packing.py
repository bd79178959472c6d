"""Weights of 8-bit codes in the layout of the CPU's kernels: a header (qfx/ops/header.py), then P =
ceil(N / 32) panels of 32 rows, first the values of each panel (csrc/cpu/gemm/pack.h):

    scale float32 [S][32]               S = 1 if a row has one scale, else ceil(K / group)
    zero point int32 [S][32]            if there are any
    sums int32 [T][32]                  of the codes of each group; T = 1 if K is not cut

then the codes of each panel, int8 [Kp / 4][32][4]: W[n, k] = codes[k // 4][n % 32][k % 4]. Kp is K
rounded up to 64. Everything beyond N and K is zero, including scales.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qfx.ops.header import HEADER_BYTES, NONE, PANEL, ZERO_POINTS, Header
from qfx.ops.layout import Layout

QUAD, K_MULTIPLE = 4, 64


class Int8Sizes(NamedTuple):
    """The sizes of a packed weight: panels, scales of a row, sums of a row, bytes of a panel's
    values and of its codes."""

    panels: Any
    scales: Any
    sums: Any
    values: Any
    codes: Any


def sizes_of(layout: Layout, k: Any) -> Int8Sizes:
    scales, sums = layout.scales(k), -(-k // layout.group) if layout.group else 1
    codes = PANEL * (-(-k // K_MULTIPLE) * K_MULTIPLE)
    values = 4 * PANEL * (scales * (1 + layout.shift) + sums)
    return Int8Sizes(-(-layout.n // PANEL), scales, sums, values, codes)


def int8_size(layout: Layout, k: Any) -> Any:
    """Returns the number of bytes of a packed weight with k columns."""
    sizes = sizes_of(layout, k)
    return HEADER_BYTES + sizes.panels * (sizes.values + sizes.codes)


def pack_int8(codes: Tensor, scale: Tensor, zero_point: Tensor | None, layout: Layout) -> Tensor:
    """Packs codes int8 [N, K], scale float32 and zero_point int32 [N, S] into the layout above."""
    (n, k), sizes = codes.shape, sizes_of(layout, codes.shape[1])
    width = sizes.codes // PANEL
    padded = F.pad(codes, (0, width - k)).reshape(n, width)
    quads = _panels(padded, sizes).reshape(sizes.panels, PANEL, width // QUAD, QUAD)
    values = [scale] if zero_point is None else [scale, zero_point]
    values.append(_sums(padded, layout.group, sizes))
    fronts = torch.cat([_by_panel(each, sizes) for each in values], 1)
    contents = torch.cat([fronts.flatten(), quads.transpose(1, 2).flatten()])
    magnitude = int(codes.int().abs().max()) if codes.numel() else 0
    shift = NONE if zero_point is None else ZERO_POINTS
    groups = (layout.group, layout.scale_group)
    return Header(n, k, 8, shift, torch.float32, magnitude, *groups).before(contents)


def _sums(padded: Tensor, group: int, sizes: Int8Sizes) -> Tensor:
    """Returns the sums of the codes of each group, int32 [N, T]."""
    group = group or max(padded.shape[1], 1)
    cuts = [padded[:, i * group : (i + 1) * group] for i in range(sizes.sums)]
    sums = [cut.sum(1, dtype=torch.int32) for cut in cuts]
    return torch.stack(sums, 1) if sums else padded.new_zeros(len(padded), 0, dtype=torch.int32)


def _panels(values: Tensor, sizes: Int8Sizes) -> Tensor:
    """Cuts the rows into panels: [N, *] -> [P, 32, *], zero padded."""
    whole = F.pad(values, (0, 0, 0, sizes.panels * PANEL - len(values)))
    return whole.reshape(sizes.panels, PANEL, values.shape[1])


def _by_panel(values: Tensor, sizes: Int8Sizes) -> Tensor:
    """Converts [N, *] of four-byte elements to int8 [P, bytes]."""
    return _panels(values, sizes).transpose(1, 2).flatten(1).contiguous().view(torch.int8)


def unpack_int8(weight: Tensor, layout: Layout, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inverts pack_int8: returns codes int8 [N, K], scale float32 and zero points int32 [N, S],
    which are 0 if there are none."""
    sizes, n = sizes_of(layout, k), layout.n
    values, quads = _parts(weight, sizes)
    each = 4 * PANEL * sizes.scales
    scale = _of_panels(values[:, :each], torch.float32, n)
    zero = torch.zeros_like(scale, dtype=torch.int32)
    if layout.shift:
        zero = _of_panels(values[:, each : 2 * each], torch.int32, n)
    width = sizes.codes // PANEL
    quads = quads.reshape(sizes.panels, width // QUAD, PANEL, QUAD).transpose(1, 2)
    return quads.reshape(sizes.panels * PANEL, width)[:n, :k].contiguous(), scale, zero


def _parts(weight: Tensor, sizes: Int8Sizes) -> tuple[Tensor, Tensor]:
    """Splits a packed weight. Returns two int8 tensors with a row of bytes for each of its P
    panels: the values of the panel (scales, zero points and sums), and its codes."""
    values, codes = ((sizes.panels, sizes.values), (sizes.panels, sizes.codes))
    parts = weight[HEADER_BYTES:].split([math.prod(values), math.prod(codes)])
    return parts[0].reshape(values), parts[1].reshape(codes)


def _of_panels(content: Tensor, dtype: torch.dtype, n: int) -> Tensor:
    """Inverts _by_panel: returns [n, *] of `dtype` from int8 [P, bytes]."""
    panels, count = len(content), content.shape[1] // (4 * PANEL)
    values = content.reshape(-1).view(dtype).reshape(panels, count, PANEL)
    return values.transpose(1, 2).reshape(panels * PANEL, count)[:n].contiguous()


def scales_of_rows(weight: Tensor, n: int) -> Tensor:
    """Returns the scales, float32 [N], of a weight of any K with one scale per row and no zero
    points."""
    panels = -(-n // PANEL)  # each panel has a scale and a sum for each row
    values = weight[HEADER_BYTES : HEADER_BYTES + panels * 8 * PANEL].reshape(panels, 8 * PANEL)
    return _of_panels(values[:, : 4 * PANEL], torch.float32, n).reshape(n)
