"""kv_copy_blocks, and the blocks of 16 tokens of which a cache consists. This module contains the
reference and the fake implementation of the operator.

A block table int32 [B, L / 16] names, for each sequence and each of its blocks, the sequence whose
memory holds the block, so that beams share their common tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qfx.ops.registry import fake, reference

TOKENS = 16  # in a block of keys
LARGEST_STEP = 128  # tokens that one step writes before it reads


def ring_slots(window: int) -> int:
    """Returns the number of slots of a ring cache for attention in which a query sees `window`
    keys, including its own. Token n is stored at slot n modulo this number.

    After a step of LARGEST_STEP tokens has filled whole blocks, the keys that its first query sees
    must still be present: window + LARGEST_STEP + TOKENS, rounded up to whole blocks."""
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
    """Copies block `blocks[b]` of 16 tokens of sequence `sources[b]` to the same block of sequence
    b, both int64 [B]; nothing if `blocks[b]` is -1. All blocks are read before one is written.

    Raises an error, before anything is written, for a source or block outside the cache, and for
    tensors of the cache that share memory, as in `kv_write`.
    """
    pairs = zip(sources.tolist(), blocks.tolist(), strict=True)
    copies = [(b, source, block) for b, (source, block) in enumerate(pairs) if block >= 0]
    for tensor in (keys, key_scale, values, value_scale):
        whole = _in_blocks(tensor)
        found = [whole[s, :, k].clone() for _, s, k in copies]
        for (b, _, k), block in zip(copies, found, strict=True):
            whole[b, :, k] = block


def _in_blocks(tensor: Tensor) -> Tensor:
    """Returns a view of a tensor of a cache with an axis of blocks: keys as they are, scales and
    values as [B, H, L / 16, 16, bytes]."""
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
    """Returns a tensor of a cache with the blocks that a block table names; the tensor itself if
    `table` is None."""
    if table is None:
        return tensor
    blocks = torch.arange(table.shape[1], dtype=torch.int64, device=table.device)
    found = _in_blocks(tensor).transpose(1, 2)[table.long(), blocks].transpose(1, 2)
    return found if tensor.ndim == 5 else found.flatten(2, 3)
