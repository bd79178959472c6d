"""kv_copy_blocks, and the blocks of 16 tokens in which a cache lies. Reference, fake.

A block table int32 [B, L / 16] names for each sequence the sequence in whose memory each of its
blocks lies, so that beams share what they have in common.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qfx.ops.registry import fake, reference

TOKENS = 16  # of a block of keys
LARGEST_STEP = 128  # tokens that one step writes before it reads


def ring_slots(window: int) -> int:
    """Slots of a cache in which token n lies at slot n modulo this number, for queries that see
    `window` keys, their own included. When a step of LARGEST_STEP tokens has filled whole blocks,
    what its first query sees is there still: window + LARGEST_STEP + TOKENS, rounded up to whole
    blocks."""
    return -(-(window + LARGEST_STEP + TOKENS) // TOKENS) * TOKENS


def check_distinct(op: str, *cache: Tensor) -> None:
    for tensor, name in zip(cache, ("keys", "key_scale", "values", "value_scale"), strict=True):
        if any(stride == 0 for stride in tensor.stride()[:2]) and tensor.numel():
            raise RuntimeError(
                f"{op}: {name} is to be written, but elements of its shape "
                f"{'x'.join(map(str, tensor.shape))} share memory; pass a clone"
            )


@reference
def kv_copy_blocks(
    keys: Tensor,
    key_scale: Tensor,
    values: Tensor,
    value_scale: Tensor,
    sources: Tensor,
    blocks: Tensor,
) -> None:
    """Copies block `blocks[b]` of 16 tokens of sequence `sources[b]` to that of sequence b, both
    int64 [B]; where `blocks[b]` is -1, nothing. All blocks are read before one is written.

    A source or block outside the cache is an error, before anything is written; so are tensors of
    the cache that share memory, as in `kv_write`.
    """
    pairs = zip(sources.tolist(), blocks.tolist(), strict=True)
    copies = [(b, source, block) for b, (source, block) in enumerate(pairs) if block >= 0]
    for tensor in (keys, key_scale, values, value_scale):
        whole = _in_blocks(tensor)
        found = [whole[s, :, k].clone() for _, s, k in copies]
        for (b, _, k), block in zip(copies, found, strict=True):
            whole[b, :, k] = block


def _in_blocks(tensor: Tensor) -> Tensor:
    """Keys as they are, scales and values as [B, H, L / 16, 16, bytes]: a view."""
    return tensor if tensor.ndim == 5 else tensor.unflatten(2, (-1, TOKENS))


@fake("kv_copy_blocks")
def _(
    keys: Tensor,
    key_scale: Tensor,
    values: Tensor,
    value_scale: Tensor,
    sources: Tensor,
    blocks: Tensor,
) -> None:
    check_distinct("kv_copy_blocks", keys, key_scale, values, value_scale)


def found_by(table: Tensor | None, tensor: Tensor) -> Tensor:
    """A tensor of a cache with the blocks that a block table finds; itself without one."""
    if table is None:
        return tensor
    blocks = torch.arange(table.shape[1], dtype=torch.int64, device=table.device)
    found = _in_blocks(tensor).transpose(1, 2)[table.long(), blocks].transpose(1, 2)
    return found if tensor.ndim == 5 else found.flatten(2, 3)
