"""binary_pack, binary_mm, binary_linear: the matmul of 1-bit operands. This module contains their
references, fake implementations and gradients.

Layout K32N32, version 2, one flat int8 tensor:

    header 64 bytes: b"QFXB", u32 version, u32 layout, u32 0, i64 N, i64 K, i64 0, and as in the
        header of pack_weight the checksum of the contents, u64 0 and the header's own checksum
    blocks uint32 [Np/32, Kp/32, 32], zero padded     Np, Kp are N, K rounded up to 32

    (W[n, k] >= 0) = blocks[n // 32, k // 32, n % 32] >> (k % 32) & 1

CUDA has another layout, because a header could not be read without waiting for the GPU. There the
sizes determine everything (csrc/cuda/gemm/bits_layout.h), zero padded:

    set int32 [N4], bits uint32 [N, Kp/32]     N4 = N rounded up to 4, Kp = K rounded up to 128

    (W[n, k] >= 0) = bits[n, k // 32] >> (k % 32) & 1,  set[n] = sum_k (W[n, k] >= 0)

Equations: docs/numerics.md (H1).
"""

from __future__ import annotations

import struct

import torch
import torch.nn.functional as F
from torch import Tensor

from qfx.ops.header import PANEL, with_header
from qfx.ops.quantize import dequantize
from qfx.ops.registry import fake, no_gradient, reference

MAGIC, VERSION, LAYOUT_K32N32 = b"QFXB", 2, 1
HEADER_BYTES, GROUP = 64, 32
CUDA_COLUMNS, CUDA_GROUP = 4, 128
INSTEAD = "train with qfx.nn.BinaryLinear, which has a straight-through gradient"


def _padded(n: int, k: int) -> tuple[int, int]:
    return -(-n // PANEL) * PANEL, -(-k // GROUP) * GROUP


def packed_size(n: int, k: int) -> int:
    """Returns the number of bytes of a packed 1-bit weight [n, k] on the CPU."""
    n_padded, k_padded = _padded(n, k)
    return HEADER_BYTES + n_padded * k_padded // 8


def _signs(t: Tensor) -> Tensor:
    """Returns +1 where t >= 0, -0.0 included, and -1 elsewhere, NaN included. (H1)"""
    return 2 * (t >= 0).double() - 1


@reference
def binary_pack(w: Tensor) -> Tensor:
    """Packs w [N, K] of any float dtype or int8 into the layout above."""
    n, k = w.shape
    n_padded, k_padded = _padded(n, k)
    bits = F.pad((w >= 0).to(torch.uint8), (0, k_padded - k, 0, n_padded - n))
    places = torch.arange(8, dtype=torch.int64, device=w.device)
    octets = (bits.reshape(n_padded, k_padded // 8, 8) << places).sum(-1)
    words = octets.to(torch.uint8).reshape(n_padded // PANEL, PANEL, k_padded // GROUP, 4)
    fields = struct.pack("<4sIIIqqq", MAGIC, VERSION, LAYOUT_K32N32, 0, n, k, 0)
    return with_header(fields, HEADER_BYTES, words.transpose(1, 2).reshape(-1).view(torch.int8))


def cuda_packed_size(n: int, k: int) -> int:
    """Returns the number of bytes of a packed 1-bit weight [n, k] on CUDA."""
    return 4 * (-(-n // CUDA_COLUMNS) * CUDA_COLUMNS) + n * -(-k // CUDA_GROUP) * CUDA_GROUP // 8


def cuda_binary_pack(w: Tensor) -> Tensor:
    """Packs w, on any device, into the layout of binary_pack on CUDA."""
    n, k = w.shape
    octets = -(-k // CUDA_GROUP) * CUDA_GROUP // 8
    bits = F.pad((w >= 0).to(torch.uint8), (0, -k % CUDA_GROUP)).reshape(n, octets, 8)
    packed = (bits << torch.arange(8, dtype=torch.int64, device=w.device)).sum(-1).to(torch.uint8)
    counts = F.pad((w >= 0).sum(1, dtype=torch.int32), (0, -n % CUDA_COLUMNS))
    return torch.cat([counts.view(torch.int8), packed.reshape(-1).view(torch.int8)])


@fake("binary_pack")
def _(w: Tensor) -> Tensor:
    size = cuda_packed_size if w.device.type == "cuda" else packed_size
    return w.new_empty(size(*w.shape), dtype=torch.int8)


def unpacked_signs(packed: Tensor, n: int, k: int) -> Tensor:
    """Returns the signs stored by binary_pack: +1 or -1, float64 [n, k]."""
    n_padded, k_padded = _padded(n, k)
    words = packed[HEADER_BYTES:].reshape(n_padded // PANEL, k_padded // GROUP, PANEL, 4, 1)
    bits = (words >> torch.arange(8, dtype=torch.int8, device=packed.device)) & 1
    return 2.0 * bits.transpose(1, 2).reshape(n_padded, k_padded)[:n, :k].double() - 1.0


def octets_of(packed: Tensor, n: int, k: int) -> Tensor:
    """Returns the signs of a packed weight [n, k], of either layout, as uint8 [n, k / 8], rounded
    up: bit k % 8 of byte k // 8 is 1 if w_nk >= 0."""
    if packed.device.type == "cuda":
        return cuda_octets_of(packed, n, k)
    n_padded, k_padded = _padded(n, k)
    words = packed[HEADER_BYTES:].view(torch.uint8)
    words = words.reshape(n_padded // PANEL, k_padded // GROUP, PANEL, 4).transpose(1, 2)
    return words.reshape(n_padded, k_padded // 8)[:n, : -(-k // 8)].contiguous()


def cuda_octets_of(packed: Tensor, n: int, k: int) -> Tensor:
    """Returns the signs of a packed 1-bit weight [n, k] as uint8 [n, k / 8], rounded up, 8 signs
    in a byte: bit k % 8 of byte k // 8 is 1 if w_nk >= 0. The weight has the layout for CUDA and
    may be on any device; `octets_of` does the same for both layouts."""
    counts = 4 * (-(-n // CUDA_COLUMNS) * CUDA_COLUMNS)
    octets = packed[counts:].view(torch.uint8)
    return octets.reshape(n, -(-k // CUDA_GROUP) * CUDA_GROUP // 8)[:, : -(-k // 8)].contiguous()


def signs_of(octets: Tensor, k: int) -> Tensor:
    """Converts the bits that `octets_of` returns, uint8 [n, k / 8] rounded up, to signs +1 or -1,
    int8 [n, k]."""
    places = torch.arange(8, dtype=torch.uint8, device=octets.device)
    bits = (octets[:, :, None] >> places) & 1
    return 2 * bits.reshape(octets.shape[0], -1)[:, :k].to(torch.int8) - 1


def packed_octets(octets: Tensor, k: int) -> Tensor:
    """Inverts `octets_of`: packs bits uint8 [n, k / 8] in the layout of the kernels for their
    device."""
    return torch.ops.qfx.binary_pack(signs_of(octets, k))  # type: ignore[no-any-return]


@reference
def binary_mm(x: Tensor, packed: Tensor, n: int) -> Tensor:
    """Computes sum_k sign(x[m, k]) sign(w[n, k]) exactly: x [..., K] float -> int32 [..., n].
    (H1)"""
    rows = _signs(x).reshape(x.shape[:-1].numel(), x.shape[-1])
    sums = rows @ unpacked_signs(packed, n, x.shape[-1]).t()
    return sums.int().reshape(*x.shape[:-1], n)


@fake("binary_mm")
def _(x: Tensor, packed: Tensor, n: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], n), dtype=torch.int32)


@reference
def binary_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """Computes dequantize(binary_mm(x)) -> out_dtype [..., N]. `scale` float32 [N]: the scale of x
    times that of w. A row of x with a NaN gives NaN. (H2)"""
    sums = binary_mm(x, packed, scale.numel())
    unknown = x.isnan().any(-1, keepdim=True)
    row_scale = torch.ones_like(unknown, dtype=torch.float32).masked_fill(unknown, torch.nan)
    return dequantize(sums, row_scale, None, scale, bias, activation, out_dtype)


@fake("binary_linear")
def _(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    activation: str,
    out_dtype: torch.dtype,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], scale.shape[0]), dtype=out_dtype)


no_gradient("binary_pack", INSTEAD)
no_gradient("binary_mm", INSTEAD)
no_gradient("binary_linear", INSTEAD)
