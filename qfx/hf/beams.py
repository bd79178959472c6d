"""Beam search: lets sequences of a KV cache share the blocks of tokens that they have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qfx.ops.kv_blocks import TOKENS


def read_by(layer: Any, source: Tensor, counts: Tensor) -> Tensor:
    """Returns the block table of a KVLayer after beams were reordered: sequence b continues
    sequence `source[b]` and reads the blocks of that sequence.

    Sequence b writes to its own blocks. It holds `held[b]` tokens; the block that it is filling is
    copied.
    """
    rows, blocks = len(source), layer.key_scale.shape[2] // TOKENS
    own = torch.arange(rows, dtype=torch.int64, device=source.device)[:, None]
    table = own.expand(rows, blocks) if layer.table is None else layer.table.long()
    table, block = table[source], layer.block_of(counts)
    last = table.gather(1, block.clamp(max=blocks - 1)[:, None])[:, 0]
    filling = torch.where(counts % TOKENS != 0, block, -1)
    torch.ops.qfx.kv_copy_blocks(*layer.tensors, last, filling)
    numbers = torch.arange(blocks, dtype=torch.int64, device=source.device)
    shared = layer.shared(numbers, counts[:, None], filling[:, None])
    return torch.where(shared, table, own).to(torch.int32)
