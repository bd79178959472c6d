"""KV caches of transformers whose layers store int8 or int4. See docs/generate.md."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from qfx.hf.kv_layer import KVLayer
from qfx.hf.layer_kinds import layer_kinds, made_layer, window_of
from qfx.ops.kv_blocks import TOKENS


class StaticKVLayer(KVLayer):
    """A layer of a KV cache with a fixed number of tokens, all of which masks and attentions see.

    Graphs need not be compiled again as it fills. The number of tokens in it is a tensor.
    """

    is_compileable = True
    is_croppable = False

    def __init__(self, capacity: int, key_bits: int = 8, value_bits: int = 8) -> None:
        super().__init__(capacity, key_bits, value_bits)
        self.capacity = -(-capacity // TOKENS) * TOKENS  # the size of the tensors
        self.cumulative_length = torch.tensor(0, dtype=torch.int64, device="cpu")  # type: ignore[assignment]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        count = key_states.shape[2]
        places = torch.arange(count, dtype=torch.int64, device=key_states.device)
        places = places + self.cumulative_length
        self.cumulative_length.add_(count)  # type: ignore[attr-defined]
        assert self.capacity is not None
        return self.write(key_states, value_states, places, self.capacity)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        assert self.capacity is not None
        return self.capacity, 0

    def get_seq_length(self) -> int:
        return self.cumulative_length if self.is_initialized else 0  # type: ignore[return-value]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def reset(self) -> None:
        self.cumulative_length.zero_()  # type: ignore[attr-defined]


class KVCache(Cache):
    """A KV cache that stores keys and values in int8 or int4, passed to a model as
    `past_key_values`.

        model.generate(ids, past_key_values=qfx.hf.KVCache(model.config))

    `config`: the config of the model. `max_cache_len`: the number of tokens that fit, rounded up to
    a multiple of 16 and known to compiled graphs. Without it the cache grows like a DynamicCache,
    and layers with a sliding window keep only the last tokens (docs/generate.md). `key_bits`,
    `value_bits`: 8 or 4. Each token of each head is rotated and has its own scale, see
    docs/numerics.md (K1). Memory per token and head: D + 4 bytes for 8 bits and D / 2 + 8 for 4
    bits, for keys and for values each.

    Raises ValueError for other bits, for no room, and for layers without keys and values.
    """

    def __init__(
        self,
        config: Any,
        max_cache_len: int | None = None,
        *,
        key_bits: int = 8,
        value_bits: int = 8,
    ) -> None:
        kinds, bits = layer_kinds(config), (key_bits, value_bits)
        layers: list[KVLayer]
        if max_cache_len is None:
            layers = [made_layer(kind, window_of(config, kind), None, bits) for kind in kinds]
        else:
            layers = [StaticKVLayer(max_cache_len, *bits) for _ in kinds]
        super().__init__(layers=layers)  # type: ignore[arg-type]
