"""Keys and values in int8: caches of transformers whose layers hold codes. docs/generate.md"""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from qfx.ops.kv_cache import TOKENS, kv_empty

ops = torch.ops.qfx
_FIRST = 256  # tokens that a growing cache begins with
NAMES = ("keys", "key_scale", "values", "value_scale")
_changes = count(1)


def _told(name: str) -> Any:
    """An attribute, of whose changes KVLayer.changes tells."""
    own = f"_{name}"

    def change(layer: KVLayer, value: Tensor | None) -> None:
        setattr(layer, own, value)
        KVLayer.changes = next(_changes)

    return property(lambda layer: getattr(layer, own), change)


class KVLayer(CacheLayerMixin):
    """Of one layer. `capacity`: tokens that it has room for, None for one that grows. `changes`:
    of all layers; another number when a tensor of one of them became another."""

    changes = 0
    keys, key_scale, values, value_scale = map(_told, NAMES)

    is_compileable = False
    is_croppable = True
    is_sliding = False  # windows are the masks' part

    def __init__(self, capacity: int | None = None, key_bits: int = 8, value_bits: int = 8) -> None:
        super().__init__()
        if not {key_bits, value_bits} <= {4, 8}:
            raise ValueError(f"key_bits={key_bits}, value_bits={value_bits}: expected 8 or 4")
        if capacity is not None and capacity < 1:
            raise ValueError(f"a cache with room for {capacity} tokens: expected at least 1")
        self.capacity, self.bits, self.seen = capacity, (key_bits, value_bits), 0
        self.key_scale = self.value_scale = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """keys, key_scale, values, value_scale, as `torch.ops.qfx.kv_write` fills them."""
        return tuple(getattr(self, name) for name in NAMES)  # type: ignore[return-value]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        _check_alike(key_states, value_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.shape = (key_states.shape[1], key_states.shape[-1])  # heads and features
        self._allocate(key_states, self.capacity or _FIRST)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes key_states and value_states [B, heads, T, D] behind those seen; returns all keys
        and values as floats. ValueError beyond `capacity`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        first, seen = self.seen, self.seen + key_states.shape[2]
        self._reserve(key_states, seen)
        places = torch.arange(first, seen, dtype=torch.int64, device=key_states.device)
        found = self.write(key_states, value_states, places, seen)
        self.seen = seen
        return found

    def write(
        self, keys: Tensor, values: Tensor, places: Tensor, length: int
    ) -> tuple[Tensor, Tensor]:
        """Writes to the places [T]; returns the first `length` tokens."""
        ops.kv_write(*self.tensors, keys, values, places)
        all_keys, key_scale, all_values, value_scale = self.tensors
        return (
            ops.kv_keys(all_keys, key_scale, length, keys.dtype),
            ops.kv_values(all_values, value_scale, length, values.dtype),
        )

    def _reserve(self, like: Tensor, seen: int) -> None:
        assert self.key_scale is not None
        room = self.key_scale.shape[2]
        if seen <= (self.capacity or room):
            return
        if self.capacity is not None:
            raise ValueError(
                f"the cache has room for {self.capacity} tokens and would hold {seen}; make it "
                "longer (max_cache_len), or generate fewer tokens"
            )
        former = self.tensors
        self._allocate(like, max(2 * room, seen))
        for old, new in zip(former, self.tensors, strict=True):
            new[:, :, : old.shape[2]].copy_(old)

    def _allocate(self, like: Tensor, length: int) -> None:
        batch, heads, _, d = like.shape
        made = kv_empty(batch, heads, length, d, *self.bits)
        for name, tensor in zip(NAMES, made, strict=True):
            setattr(self, name, tensor)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return self.capacity or -1

    def reset(self) -> None:
        """Forgets all; the next tokens may be of another number of sequences."""
        self.seen, self.is_initialized = 0, False

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last ones; a negative number, as transformers passes it. A layer that holds
        nothing yet stays so."""
        if not self.is_initialized:
            return
        if tokens_to_remove > 0 or -tokens_to_remove > self.seen:
            raise ValueError(
                f"crop({tokens_to_remove}) of a cache of {self.seen} tokens: give a negative "
                "number of tokens to remove"
            )
        self.seen += tokens_to_remove

    def activate_past_recording(self) -> None:
        """For what crops later, which needs nothing here."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            keys = self.tensors[0]
            batch = torch.arange(len(keys), dtype=torch.int64, device=keys.device)
            self.batch_select_indices(batch.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.is_initialized:
            for name, tensor in zip(NAMES, self.tensors, strict=True):
                setattr(self, name, tensor[indices])

    def offload(self) -> None:
        raise NotImplementedError("an int8 cache is on the CPU already: pass no offloading")

    def prefetch(self) -> None:
        raise NotImplementedError("an int8 cache is on the CPU already: pass no offloading")


class StaticKVLayer(KVLayer):
    """Of a fixed length that all masks and attentions see, so that graphs need not be compiled
    again as it fills; what it has seen is a tensor."""

    is_compileable = True
    is_croppable = False

    def __init__(self, capacity: int, key_bits: int = 8, value_bits: int = 8) -> None:
        super().__init__(capacity, key_bits, value_bits)
        self.capacity = -(-capacity // TOKENS) * TOKENS  # all of the tensors: no write goes beyond
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

    def reset(self) -> None:
        self.cumulative_length.zero_()  # type: ignore[attr-defined]


class KVCache(Cache):
    """int8 keys and values, passed as `past_key_values`.

    `config`: the model's. `max_cache_len`: tokens that it has room for, rounded up to a multiple of
    16 and known to compiled graphs; without it the cache grows as a DynamicCache. `key_bits`,
    `value_bits`: 8 or 4. Each token of each head is rotated, and has a scale of its own:
    docs/numerics.md (K1). Memory a token and head: D + 4 bytes in 8 bits, D / 2 + 8 in 4, for keys
    and for values. ValueError for other bits, no room, and layers without keys and values.
    """

    def __init__(
        self,
        config: Any,
        max_cache_len: int | None = None,
        *,
        key_bits: int = 8,
        value_bits: int = 8,
    ) -> None:
        count = layers_of(config)
        if max_cache_len is None:
            layers = [KVLayer(None, key_bits, value_bits) for _ in range(count)]
        else:
            layers = [StaticKVLayer(max_cache_len, key_bits, value_bits) for _ in range(count)]
        super().__init__(layers=layers)  # type: ignore[arg-type]


def layers_of(config: Any) -> int:
    """How many layers have keys and values of their own; ValueError where some have other states"""
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if other := kinds - {"full_attention", "sliding_attention", "chunked_attention"}:
        raise ValueError(
            f"layers of {text.model_type} are {', '.join(sorted(other))}: an int8 cache holds keys "
            "and values of attention alone"
        )
    shared: int = getattr(text, "num_kv_shared_layers", 0) or 0
    return int(text.num_hidden_layers) - shared


def _check_alike(keys: Tensor, values: Tensor) -> None:
    if keys.shape[-1] != values.shape[-1]:
        raise ValueError(
            f"keys have {keys.shape[-1]} features and values {values.shape[-1]}: an int8 cache "
            "holds as many of both"
        )
