"""kv_write, kv_keys, kv_values: a KV cache in codes of 8 or 4 bits. This module contains their
references, fake implementations and gradients.

A cache is four tensors whose first two axes are sequences and heads; rows may be selected,
reordered and repeated along these. With 8 bits there are int8 codes with one scale per token and
head. With 4 bits there are two codes 0..15 in a uint8, with a scale and a minimum. The tensors are:
keys [B, H, L / 16, D * bits / 8, 16] (feature d is byte d, or half d % 2 of byte d // 2), values
[B, H, L, E * bits / 8] (feature e is byte e, or e % (E / 2), the upper half from E / 2 on), scales
float32 [B, H, L, 1 or 2]. See docs/numerics.md (K1), (K2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from qfx.ops.code import Code
from qfx.ops.kv_blocks import TOKENS, check_distinct, found_by
from qfx.ops.quantize import SMALLEST_SCALE, quantize
from qfx.ops.registry import fake, no_gradient, reference
from qfx.ops.rotation import rotate, rotated_blocks

LARGEST_ROTATION = 256


def kv_empty(
    batch: int, heads: int, length: int, d: int, key_bits: int = 8, value_bits: int = 8
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the tensors (keys, key_scale, values, value_scale) of an empty cache: zeros, on the
    CPU. `length`: the number of tokens for which there is room, rounded up to a multiple of 16.
    `d`: the number of features of a key and of a value.

    For each token and head, keys take `d * bits / 8` bytes, and 4 bytes more for a scale with 8
    bits, or 8 bytes more for a scale and a minimum with 4 bits. Values take the same. Raises
    ValueError for bits that are neither 8 nor 4, and for an odd `d` with 4 bits.
    """
    shapes = kv_shapes(batch, heads, length, d, key_bits, value_bits)
    keys, key_scale, values, value_scale = (
        torch.zeros(shape, dtype=dtype, device="cpu") for shape, dtype in shapes
    )
    return keys, key_scale, values, value_scale


def kv_shapes(
    batch: int, heads: int, length: int, d: int, key_bits: int = 8, value_bits: int = 8
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Returns the shape and dtype of each tensor of `kv_empty`. Raises ValueError in the same
    cases."""
    capacity = -(-length // TOKENS) * TOKENS
    key_size, key_dtype, key_scales = _token(d, key_bits)
    size, dtype, scales = _token(d, value_bits)
    return [
        ((batch, heads, capacity // TOKENS, key_size, TOKENS), key_dtype),
        ((batch, heads, capacity, key_scales), torch.float32),
        ((batch, heads, capacity, size), dtype),
        ((batch, heads, capacity, scales), torch.float32),
    ]


def _token(d: int, bits: int) -> tuple[int, torch.dtype, int]:
    """Returns, for one token and head, the number of bytes of its codes, the dtype of these bytes,
    and how many scales there are (a minimum counts as one)."""
    if bits not in (4, 8):
        raise ValueError(f"a cache of {bits} bits: expected 8 or 4")
    if bits == 4 and d % 2:
        raise ValueError(f"a cache of 4 bits with D={d}: two features share a byte, so D is even")
    return (d, torch.int8, 1) if bits == 8 else (d // 2, torch.uint8, 2)


def bits_of(scale: Tensor) -> int:
    return 8 if scale.shape[-1] == 1 else 4


def features_of(codes: Tensor, scale: Tensor) -> int:
    """Returns the number of features D of keys or values."""
    size = codes.shape[3]
    return size if bits_of(scale) == 8 else 2 * size


def rotation_of(d: int) -> int:
    """Returns the size of the blocks in which D features are rotated: the largest power of two that
    divides D, at most 256; 0 for no rotation if that is 1."""
    block = min(d & -d, LARGEST_ROTATION)
    return block if block > 1 else 0


def _encode(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Encodes x [..., D] as codes [..., D] and scales [..., 1 or 2]. (K1)"""
    rotation = rotation_of(x.shape[-1])
    if bits == 8:
        return quantize(x, Code(rotation=rotation))[:2]
    x = torch.nn.functional.pad(rotate(x.float(), None, rotation), (0, 1))  # the range holds zero
    low, high = x.amin(-1, keepdim=True) + 0, x.amax(-1, keepdim=True)
    largest = torch.maximum(high, -low)
    finite = largest.isfinite()
    scale = (high / 15 - low / 15).clamp_min(SMALLEST_SCALE)
    codes = ((x[..., :-1] - low) * (1 / scale)).clamp_max(15).round()
    scales = torch.cat([torch.where(finite, scale, largest), torch.where(finite, low, 0)], -1)
    return torch.where(finite, codes, 0).to(torch.uint8), scales


@reference
def kv_write(
    keys: Tensor,
    key_scale: Tensor,
    values: Tensor,
    value_scale: Tensor,
    k: Tensor,
    v: Tensor,
    places: Tensor,
) -> None:
    """Writes the tokens k [B, H, T, D] and v [B, H, T, E] to `places` of a cache: int64 [T], or [B,
    T] if each sequence has its own. A token at place -1 is not written. (K1)

    If two tokens have the same place, the later one stays. Raises an error, before anything is
    written, for a place outside the cache, and if two tensors of the cache, or two elements of one,
    share memory. To autograd the written values are constants.
    """
    k_codes, k_scales = _encode(k, bits_of(key_scale))
    v_codes, v_scales = _encode(v, bits_of(value_scale))
    if bits_of(key_scale) == 4:
        k_codes = k_codes[..., 0::2] | k_codes[..., 1::2] << 4
    if bits_of(value_scale) == 4:
        lower, upper = v_codes.tensor_split(2, dim=-1)
        v_codes = lower | upper << 4
    for b, row in enumerate(places.expand(len(keys), -1).tolist()):
        for t, place in enumerate(row):
            if place >= 0:
                keys[b, :, place // TOKENS, :, place % TOKENS] = k_codes[b, :, t]
                key_scale[b, :, place] = k_scales[b, :, t]
                values[b, :, place] = v_codes[b, :, t]
                value_scale[b, :, place] = v_scales[b, :, t]


@fake("kv_write")
def _(
    keys: Tensor,
    key_scale: Tensor,
    values: Tensor,
    value_scale: Tensor,
    k: Tensor,
    v: Tensor,
    places: Tensor,
) -> None:
    check_distinct("kv_write", keys, key_scale, values, value_scale)


def key_codes(keys: Tensor, key_scale: Tensor, length: int) -> Tensor:
    """Returns the codes [B, H, length, D] of the first `length` keys."""
    codes = keys.transpose(-1, -2).flatten(2, 3)[:, :, :length]
    if bits_of(key_scale) == 4:
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    return codes


def value_codes(values: Tensor, value_scale: Tensor, length: int) -> Tensor:
    """Returns the codes [B, H, length, E] of the first `length` values."""
    codes = values[:, :, :length]
    return codes if bits_of(value_scale) == 8 else torch.cat([codes & 15, codes >> 4], -1)


def decoded(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the values that the codes [B, H, N, D] represent, rotated back. (K2)"""
    scale = scale[:, :, : codes.shape[2]].to(dtype)
    x = codes.to(dtype) * scale[..., :1]
    if scale.shape[-1] == 2:
        x = x + scale[..., 1:]
    rotation = rotation_of(codes.shape[-1])
    return rotated_blocks(x, rotation, True) if rotation else x


@reference
def kv_keys(
    keys: Tensor,
    key_scale: Tensor,
    length: int,
    out_dtype: torch.dtype,
    block_table: Tensor | None = None,
) -> Tensor:
    """Returns the first `length` keys of a cache, [B, H, length, D]. (K2)"""
    keys, key_scale = (found_by(block_table, t) for t in (keys, key_scale))
    return decoded(key_codes(keys, key_scale, length), key_scale, torch.float32).to(out_dtype)


@reference
def kv_values(
    values: Tensor,
    value_scale: Tensor,
    length: int,
    out_dtype: torch.dtype,
    block_table: Tensor | None = None,
) -> Tensor:
    """Returns the first `length` values of a cache, [B, H, length, E]. (K2)"""
    values, value_scale = (found_by(block_table, t) for t in (values, value_scale))
    return decoded(value_codes(values, value_scale, length), value_scale, torch.float32).to(
        out_dtype
    )


def _fake_read(
    codes: Tensor,
    scale: Tensor,
    length: int,
    out_dtype: torch.dtype,
    block_table: Tensor | None = None,
) -> Tensor:
    shape = (*codes.shape[:2], length, features_of(codes, scale))
    return codes.new_empty(shape, dtype=out_dtype)


fake("kv_keys")(_fake_read)
fake("kv_values")(_fake_read)
INSTEAD = "use a cache in float where gradients are needed"
no_gradient("kv_keys", INSTEAD)
no_gradient("kv_values", INSTEAD)
