"""pack_weight and unpack_weight: the layout the GEMM kernels read.

Layout K4N32, version 3, one flat int8 tensor:
    header 64 bytes: b"QFXW", u32 version, u32 layout, u32 max|W|, i64 N, i64 K, i64 group,
        u64 checksum of what is behind the header, u64 0, u64 checksum of the header, where it is 0
    colsum int32 [Np], colsum[n] = sum_k W[n, k]          Np = N rounded up to 32
    blocks int8 [Np/32, Kp/4, 32, 4], zero padded         Kp = K rounded up to 64
    W[n, k] = blocks[n // 32, k // 4, n % 32, k % 4]
    group_sums int32 [Np/32, G, 32], only if group > 0    G = ceil(K / group)
    group_sums[n // 32, g, n % 32] = sum_k W[n, k], k // group = g

On CUDA, where a header could not be read without waiting for the GPU, another one, of which sizes
say everything (csrc/cuda/gemm/layout.h):
    colsum int32 [N4], W int8 [N, Kp], zero padded     N4 = N up to 4, Kp = K up to 16
    group_sums int32 [N, G], zeros int8 [group / 64], only if group > 0
"""

from __future__ import annotations

import struct

import torch
import torch.nn.functional as F
from torch import Tensor

from qfx.ops.registry import fake, reference

MAGIC, VERSION, LAYOUT_K4N32 = b"QFXW", 3, 1
HEADER_BYTES, PANEL, GROUP, K_MULTIPLE = 64, 32, 4, 64
CUDA_COLUMNS, CUDA_PITCH = 4, 16


def _padded(n: int, k: int) -> tuple[int, int]:
    return -(-n // PANEL) * PANEL, -(-k // K_MULTIPLE) * K_MULTIPLE


def packed_size(n: int, k: int, group: int = 0) -> int:
    """Bytes of a packed [n, k] weight."""
    n_padded, k_padded = _padded(n, k)
    sums = 1 + -(-k // group) if group else 1
    return HEADER_BYTES + 4 * n_padded * sums + n_padded * k_padded


@reference
def pack_weight(w: Tensor, group: int = 0) -> Tensor:
    """w int8 [N, K] -> the layout above. `group`: elements of K that share a scale, a multiple of
    64, for int8_linear_groups; 0 where all share one."""
    n, k = w.shape
    n_padded, k_padded = _padded(n, k)
    magnitude = int(w.int().abs().max()) if w.numel() else 0
    padded = F.pad(w, (0, k_padded - k, 0, n_padded - n))
    colsum = padded.sum(1, dtype=torch.int32)
    blocks = padded.reshape(n_padded // PANEL, PANEL, k_padded // GROUP, GROUP).transpose(1, 2)
    sums = _group_sums(padded, k, group)
    contents = torch.cat([colsum.view(torch.int8), blocks.reshape(-1), *sums])
    fields = (MAGIC, VERSION, LAYOUT_K4N32, magnitude, n, k, group)
    return with_header(struct.pack("<4sIIIqqq", *fields), contents)


def with_header(fields: bytes, contents: Tensor) -> Tensor:
    """The contents behind a header of these fields, 40 bytes, and of both checksums."""
    said = fields + struct.pack("<QQ", checksum(contents), 0)
    header = said + struct.pack("<Q", checksum(_bytes(said + bytes(8))))
    return torch.cat([_bytes(header).to(contents.device), contents])


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.int8)


def checksum(t: Tensor) -> int:
    """sum_{r, l} (2 r + 1) (2 l + 1) word[r, l] mod 2^64 of rows of four 64-bit words, int8 [*]."""
    words = t.view(torch.int64).reshape(-1, 4)
    numbers = [torch.arange(n, dtype=torch.int64, device=t.device) for n in words.shape]
    odd = [2 * each + 1 for each in numbers]
    return int((words * odd[0][:, None] * odd[1]).sum()) % 2**64


def _group_sums(padded: Tensor, k: int, group: int) -> list[Tensor]:
    if group == 0:
        return []
    panels = padded.reshape(padded.shape[0] // PANEL, PANEL, padded.shape[1])
    groups = [panels[..., i : i + group].sum(-1, dtype=torch.int32) for i in range(0, k, group)]
    return [torch.stack(groups, 1).reshape(-1).view(torch.int8)] if groups else []


def group_of(packed: Tensor, k: int) -> int:
    """Elements of K that share a scale of a packed weight, rounded up to 64 where all do."""
    (group,) = struct.unpack_from("<q", bytes(packed[:HEADER_BYTES].view(torch.uint8).tolist()), 32)
    return int(group) or max(_padded(0, k)[1], K_MULTIPLE)


def cuda_packed_size(n: int, k: int, group: int = 0) -> int:
    """Bytes of a packed [n, k] weight on CUDA."""
    columns = 4 * (-(-n // CUDA_COLUMNS) * CUDA_COLUMNS)
    size = columns + n * (-(-k // CUDA_PITCH) * CUDA_PITCH)
    if not group:
        return size
    group = min(group, max(_padded(0, k)[1], K_MULTIPLE))  # a longer one is as good as all of K
    return size + 4 * n * -(-k // group) + group // K_MULTIPLE


def cuda_pack_weight(w: Tensor, group: int = 0) -> Tensor:
    """pack_weight as it is on CUDA, of w on any device."""
    n, k = w.shape
    colsum = F.pad(w.sum(1, dtype=torch.int32), (0, -n % CUDA_COLUMNS))
    parts = [colsum.view(torch.int8), F.pad(w, (0, -k % CUDA_PITCH)).reshape(-1)]
    if group:
        group = min(group, max(_padded(0, k)[1], K_MULTIPLE))
        sums = [w[:, i : i + group].sum(1, dtype=torch.int32) for i in range(0, k, group)]
        parts += [torch.stack(sums, 1).reshape(-1).view(torch.int8)] if sums else []
        parts += [w.new_zeros(group // K_MULTIPLE)]
    return torch.cat(parts)


@fake("pack_weight")
def _(w: Tensor, group: int = 0) -> Tensor:
    n, k = w.shape
    size = cuda_packed_size if w.device.type == "cuda" else packed_size
    return w.new_empty(size(n, k, group))


@reference
def unpack_weight(packed: Tensor, n: int, k: int) -> Tensor:
    """The inverse of pack_weight: int8 [n, k]."""
    n_padded, k_padded = _padded(n, k)
    start = HEADER_BYTES + 4 * n_padded
    blocks = packed[start : start + n_padded * k_padded]
    blocks = blocks.reshape(n_padded // PANEL, k_padded // GROUP, PANEL, GROUP).transpose(1, 2)
    return blocks.reshape(n_padded, k_padded)[:n, :k].contiguous()


@fake("unpack_weight")
def _(packed: Tensor, n: int, k: int) -> Tensor:
    return packed.new_empty(n, k)
