"""KVLayer: the keys and values of one layer in 8 or 4 bits, for caches of transformers."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from qfx.hf.beams import read_by
from qfx.ops.kv_blocks import TOKENS, found_by
from qfx.ops.kv_cache import kv_empty

ops = torch.ops.qfx
FIRST = 256  # initial capacity, in tokens, of a cache that grows
NAMES = ("keys", "key_scale", "values", "value_scale")
_changes = count(1)


def _counted(name: str) -> Any:
    """Returns a property whose assignments change KVLayer.changes."""
    own = f"_{name}"

    def change(layer: KVLayer, value: Tensor | None) -> None:
        setattr(layer, own, value)
        KVLayer.changes = next(_changes)

    return property(lambda layer: getattr(layer, own), change)


class KVLayer(CacheLayerMixin):
    """The keys and values of one layer, quantized to 8 or 4 bits.

    `capacity`: the number of tokens that fit; None for a layer that grows, whose initial capacity
    is `begins_with`. `seen`: the number of token columns that were passed to the model, including
    padding. `kept`: bool [batch, seen], the tokens that are stored; None if all are. The tokens of
    a sequence are stored at places 0, 1, ... in order, so a sequence is stored the same way
    whatever its padding is. `batch`: the batch size; the tensors may have room for more sequences.
    `table`: the block table of `qfx.ops.kv_blocks`; None if each sequence has its own blocks.
    `changes`: a number that all layers share, and that changes whenever a tensor of one of them is
    replaced.

    Raises ValueError for bits other than 4 and 8, and for a capacity below 1.
    """

    changes = 0
    keys, key_scale, values, value_scale = map(_counted, NAMES)

    is_compileable = False
    is_croppable = True
    is_sliding = False
    window: int | None = None  # number of keys that a query sees

    def __init__(self, capacity: int | None = None, key_bits: int = 8, value_bits: int = 8) -> None:
        super().__init__()
        if not {key_bits, value_bits} <= {4, 8}:
            raise ValueError(f"key_bits={key_bits}, value_bits={value_bits}: expected 8 or 4")
        if capacity is not None and capacity < 1:
            raise ValueError(f"a cache with room for {capacity} tokens: expected at least 1")
        self.capacity, self.bits = capacity, (key_bits, value_bits)
        self.begins_with = capacity or FIRST
        self.key_scale = self.value_scale = None
        self._clear()

    def _clear(self) -> None:
        self.seen = self.batch = 0
        self.kept: Tensor | None = None
        self.table: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """keys, key_scale, values, value_scale, as `torch.ops.qfx.kv_write` fills them."""
        return tuple(getattr(self, name) for name in NAMES)  # type: ignore[return-value]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        _check_alike(key_states, value_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads, _, d = key_states.shape
        self.shape, self.batch = (heads, d), batch
        self._keep(kv_empty(batch, heads, self.begins_with, d, *self.bits))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes key_states and value_states [B, heads, T, D] after the tokens seen so far. Returns
        the keys and values of all columns as floats. Columns of padding are not stored, and masks
        hide them: for them the values of some other column are returned. Raises ValueError beyond
        `capacity`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = key_states.shape[2]
        self._reserve(self.seen + new)
        places = torch.arange(new, dtype=torch.int64, device=key_states.device)
        places = places + (self.seen if self.kept is None else self.kept.sum(1)[:, None])
        ops.kv_write(*map(self._without_padding, self.tensors), key_states, value_states, places)
        self.seen += new
        if self.kept is not None:
            self.kept = torch.cat([self.kept, self.kept.new_ones(self.batch, new)], 1)
        return self._floats(key_states.dtype, value_states.dtype)

    def _floats(self, *dtypes: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns keys and values [batch, heads, seen, D] of all columns."""
        table = self.table
        length = self.seen if self.kept is None else int(self.kept.sum(1).max())
        parts = (self.tensors[:2], self.tensors[2:])
        read: list[Tensor] = [
            self._without_padding(op(*part, length, dtype, table))
            for op, part, dtype in zip((ops.kv_keys, ops.kv_values), parts, dtypes, strict=True)
        ]
        if self.kept is not None:
            places = (self.kept.cumsum(1) - 1).clamp(min=0)[:, None, :, None]
            shape = (self.batch, self.shape[0], self.seen, self.shape[1])
            read = [floats.gather(2, places.expand(shape)) for floats in read]
        return read[0], read[1]

    def _without_padding(self, tensor: Tensor) -> Tensor:
        return tensor if len(tensor) == self.batch else tensor[: self.batch]

    def write(
        self, keys: Tensor, values: Tensor, places: Tensor, length: int
    ) -> tuple[Tensor, Tensor]:
        """Writes keys and values [B, heads, T, D] to the places [T] or [B, T]; returns the first
        `length` tokens of each sequence as floats."""
        ops.kv_write(*self.tensors, keys, values, places)
        return (
            ops.kv_keys(*self.tensors[:2], length, keys.dtype, self.table),
            ops.kv_values(*self.tensors[2:], length, values.dtype, self.table),
        )

    def _reserve(self, seen: int) -> None:
        assert self.key_scale is not None
        room = self.key_scale.shape[2]
        if seen <= (self.capacity or room):
            return
        if self.capacity is not None:
            raise ValueError(
                f"the cache has room for {self.capacity} tokens and would hold {seen}; make it "
                "longer (max_cache_len), or generate fewer tokens"
            )
        self._own_blocks()
        self._grow(len(self.key_scale), max(2 * room, seen))

    def check_not_overwritten(self) -> None:
        """Raises ValueError if tokens that the next query attends to were overwritten. This never
        happens here, only in layers with a sliding window."""

    def make_room(self, batch: int) -> None:
        """Resizes the tensors to a batch size of `batch`; stored tokens are kept."""
        assert self.key_scale is not None
        if len(self.key_scale) != batch:
            self._own_blocks()
            self._grow(batch, self.key_scale.shape[2])

    def _grow(self, batch: int, length: int) -> None:
        heads, d = self.shape
        former = self.tensors
        self._keep(kv_empty(batch, heads, length, d, *self.bits))
        for old, new in zip(former, self.tensors, strict=True):
            new[: self.batch, :, : old.shape[2]].copy_(old[: self.batch])

    def _keep(self, tensors: tuple[Tensor, ...]) -> None:
        for name, tensor in zip(NAMES, tensors, strict=True):
            setattr(self, name, tensor)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return self.capacity or -1

    def reset(self) -> None:
        """Discards all tokens; the next call may have another batch size."""
        self._clear()
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens; `tokens_to_remove` is negative, as transformers passes it. Does
        nothing for an empty layer. Raises ValueError for a positive number and for more tokens than
        were seen."""
        if not self.is_initialized:
            return
        if tokens_to_remove > 0 or -tokens_to_remove > self.seen:
            raise ValueError(
                f"crop({tokens_to_remove}) of a cache of {self.seen} tokens: give a negative "
                "number of tokens to remove"
            )
        self._own_blocks()  # the next tokens are written to them
        self.seen += tokens_to_remove
        self.kept = None if self.kept is None else self.kept[:, : self.seen]

    def activate_past_recording(self) -> None:
        """Does nothing: cropping needs no preparation here."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Makes sequence b continue what was sequence `beam_idx[b]`. From then on full blocks are
        looked up in the table; only the block that is being filled is copied."""
        if not self.is_initialized:
            return
        if len(beam_idx) != self.batch:
            return self.batch_select_indices(beam_idx)
        assert self.key_scale is not None
        own = torch.arange(len(self.key_scale), dtype=torch.int64, device=beam_idx.device)
        source = torch.cat([beam_idx.long(), own[self.batch :]])
        if torch.equal(source, own):
            return
        counts = torch.full_like(own, self.seen)
        if self.kept is not None:
            counts[: self.batch] = self.kept.sum(1)
            if not torch.equal(counts[source], counts):  # sharing needs equal numbers of tokens
                return self.batch_select_indices(beam_idx)
            self.kept = self.kept[beam_idx]
        self.table = read_by(self, source, counts)

    def block_of(self, place: Tensor) -> Tensor:
        """Returns the number of the block (of 16 tokens) in which the token at a place is
        stored."""
        return place // TOKENS

    def shared(self, blocks: Tensor, counts: Tensor, filling: Tensor) -> Tensor:
        """Returns, for each block, whether several sequences may read it. Of the other blocks each
        sequence has its own, to which it writes. `held`: the number of tokens of each sequence;
        `filling`: the block that is partly filled, or -1."""
        return blocks < counts // TOKENS

    def _own_blocks(self) -> None:
        """Copies the blocks that the table refers to, so that each sequence has its own."""
        if self.table is not None:
            self._keep(tuple(found_by(self.table, t).contiguous() for t in self.tensors))
            self.table = None

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            each = torch.arange(self.batch, dtype=torch.int64, device=self.tensors[0].device)
            self.batch_select_indices(each.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if not self.is_initialized:
            return
        self._own_blocks()
        self._keep(tuple(t[: self.batch][indices] for t in self.tensors))
        self.kept = None if self.kept is None else self.kept[indices]
        self.batch = len(self.tensors[0])

    def offload(self) -> None:
        raise NotImplementedError("an int8 cache is on the CPU already: pass no offloading")

    prefetch = offload


def _check_alike(keys: Tensor, values: Tensor) -> None:
    if keys.shape[-1] != values.shape[-1]:
        raise ValueError(
            f"keys have {keys.shape[-1]} features and values {values.shape[-1]}: an int8 cache "
            "holds as many of both"
        )
