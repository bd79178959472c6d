"""CrossKVLayer: the cache of a cross attention, with keys and values of an encoder's output, which
are written once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qfx.hf.kv_layer import NAMES, KVLayer
from qfx.io.errors import UserError

ops = torch.ops.qfx


class CrossKVLayer(KVLayer):
    """The keys and values of one cross attention in int8 or int4.

    `capacity`: the largest number of positions of the source, the encoder's output. Modules of
    transformers read `keys` and `values`, floats [batch, heads, source, D] that are dequantized at
    each access. Programs read the int8 `tensors`. If beams are reordered, only `table` changes:
    keys and values are not copied.
    """

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Quantized keys, their scales, quantized values and their scales, as
        `torch.ops.qfx.kv_write` fills them."""
        return tuple(getattr(KVLayer, name).fget(self) for name in NAMES)  # type: ignore[return-value]

    def _floats_of(self, op: Any, begin: int) -> Tensor | None:
        if not self.is_initialized:
            return None
        codes, scale = self.tensors[begin : begin + 2]
        return self._without_padding(op(codes, scale, self.seen, self.dtype, self.table))

    keys = property(lambda self: self._floats_of(ops.kv_keys, 0), KVLayer.keys.fset)
    values = property(lambda self: self._floats_of(ops.kv_values, 2), KVLayer.values.fset)

    def _reserve(self, seen: int) -> None:
        if self.capacity is not None and seen > self.capacity:
            raise UserError(
                f"the encoder gives {seen} positions, and the cache has room for "
                f"{self.capacity}: "
                "compile_for_generate(model, max_source_length=...) says how many"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Makes sequence b continue what was sequence `beam_idx[b]`."""
        if not self.is_initialized:
            return
        if len(beam_idx) != self.batch:
            return self.batch_select_indices(beam_idx)
        codes, scale, *_ = self.tensors
        rows, blocks = len(scale), codes.shape[2]
        own = torch.arange(rows, dtype=torch.int32, device="cpu")
        source = torch.cat([beam_idx.to(own), own[self.batch :]])
        if torch.equal(source, own):
            return
        table = own[:, None].expand(rows, blocks) if self.table is None else self.table
        self.table = table[source.long()]
