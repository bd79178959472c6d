"""SlidingKVLayer: the keys and values of a layer with a sliding window, in a ring of slots."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qfx.hf.kv_layer import FIRST, KVLayer
from qfx.ops.kv_blocks import TOKENS, ring_slots
from qfx.ops.kv_cache import kv_empty

ops = torch.ops.qfx


class SlidingKVLayer(KVLayer):
    """A layer whose queries see `window` keys, including their own.

    Token n of a sequence is stored in slot n % `slots`. The tensors have `slots` slots, however
    long the sequence is. `capacity`: the largest number of tokens of a sequence in the whole cache,
    None for one that grows. `oldest`: the first column whose token is certainly stored; 0 if none
    was overwritten.

    A step may write up to 128 tokens before it reads, and when a block begins, a sequence may lose
    the rest of the block. `ring_slots` has room for both in addition to the window. Raises
    ValueError for a window below 1.
    """

    is_sliding = True  # transformers makes masks for the columns that `update` returns
    window: int

    def __init__(
        self, window: int, capacity: int | None = None, key_bits: int = 8, value_bits: int = 8
    ) -> None:
        super().__init__(capacity, key_bits, value_bits)
        if window < 1:
            raise ValueError(f"a layer with a window of {window} tokens: expected at least 1")
        self.window, self.slots = window, ring_slots(window)
        self.begins_with = self.slots if capacity is not None else min(FIRST, self.slots)

    def _clear(self) -> None:
        super()._clear()
        self.oldest = 0

    # --- reading and writing ---

    @property
    def first(self) -> int:
        """The first column that `update` returns."""
        return max(self.seen - self.window + 1, 0) if self.is_sliding else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen - self.first + query_length, self.first

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes key_states and value_states [B, heads, T, D] after the tokens seen so far.
        Returns, as floats, the keys and values of the columns of `get_mask_sizes`. For columns that
        no query sees, these may be the values of some other column. Raises ValueError beyond
        `capacity`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new, dtypes = key_states.shape[2], (key_states.dtype, value_states.dtype)
        self._reserve(self.seen + new)
        self.check_not_overwritten()
        first = self.first
        places = torch.arange(new, dtype=torch.int64, device=key_states.device)
        places = places + (self.seen if self.kept is None else self.kept.sum(1)[:, None])
        many = self.window - 1 + new > self.slots  # overwrites keys that the first of them sees
        past = self._columns(first, *dtypes) if many else ()
        self.enter(places.expand(self.batch, new), self.seen + new)
        tensors = map(self._without_padding, self.tensors)
        ops.kv_write(*tensors, key_states, value_states, places % self.slots)
        self.seen += new
        if self.kept is not None:
            self.kept = torch.cat([self.kept, self.kept.new_ones(self.batch, new)], 1)
        if not many:
            return self._columns(first, *dtypes)
        coded = self._coded(key_states, value_states)
        keys, values = (torch.cat(parts, 2) for parts in zip(past, coded, strict=True))
        return keys, values

    def _columns(self, first: int, *dtypes: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns keys and values [batch, heads, seen - first, D] of the columns from `first`
        on."""
        if self.kept is None:
            slots = torch.arange(first, self.seen, dtype=torch.int64, device=self.device)[None]
        else:
            slots = (self.kept.cumsum(1) - 1).clamp(min=0)[:, first:]
        slots = (slots % self.slots)[:, None, :, None]
        parts = (self.tensors[:2], self.tensors[2:])
        shape = (self.batch, self.shape[0], self.seen - first, self.shape[1])
        keys, values = (
            self._without_padding(op(*part, self._used(), dtype, self.table)).gather(
                2, slots.expand(shape)
            )
            for op, part, dtype in zip((ops.kv_keys, ops.kv_values), parts, dtypes, strict=True)
        )
        return keys, values

    def _used(self) -> int:
        """Returns the number of slots that may hold a token."""
        return min(self.seen, self.slots)

    def _coded(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the given keys and values quantized and dequantized."""
        batch, heads, count, d = keys.shape
        cache = kv_empty(batch, heads, count, d, *self.bits)
        places = torch.arange(count, dtype=torch.int64, device=keys.device)
        ops.kv_write(*cache, keys, values, places)
        return (
            ops.kv_keys(*cache[:2], count, keys.dtype),
            ops.kv_values(*cache[2:], count, values.dtype),
        )

    def _reserve(self, seen: int) -> None:
        if self.capacity is not None:
            return super()._reserve(seen)
        assert self.key_scale is not None
        room, needed = self.key_scale.shape[2], min(seen, self.slots)
        if needed > room:
            self._own_blocks()
            self._grow(len(self.key_scale), min(max(2 * room, needed), self.slots))

    # --- overwriting old tokens ---

    def enter(self, places: Tensor, seen: int) -> None:
        """Prepares the block table for writing tokens to `places` [batch, T] (-1 for none), which
        belong to columns up to `seen`.

        A sequence that writes the first slot of a block gets that block for itself. Sequences that
        shared the block either write its first slot at the same time, or all blocks are copied
        first.
        """
        self.oldest = max(self.oldest, seen - self.slots)
        if self.table is None:
            return
        begun = (places >= 0) & (places % TOKENS == 0)
        if not bool(begun.any()):
            return
        rows, blocks = self.table.shape
        entered = begun.new_zeros(rows, blocks)
        text, token = begun.nonzero(as_tuple=True)
        entered[text, self.block_of(places[text, token])] = True
        numbers = torch.arange(blocks, dtype=torch.int64, device=places.device)
        if bool((entered[self.table.long(), numbers] & ~entered).any()):
            return self._own_blocks()
        own = torch.arange(rows, dtype=torch.int32, device=places.device)[:, None]
        self.table = torch.where(entered, own, self.table)
        self.oldest = max(self.oldest, seen + TOKENS - 1 - self.slots)  # the rest of the block, too

    def check_not_overwritten(self) -> None:
        """Raises ValueError if the next query would see tokens that were overwritten."""
        if self.oldest > max(self.seen - self.window + 1, 0):
            raise ValueError(
                f"the cache holds {self.seen} tokens, of which a layer with a window of "
                f"{self.window} has those from {self.oldest} on: a call that was cut off has "
                "overwritten the others; read the text again"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Removes tokens like KVLayer. Raises ValueError if a token that the next query sees was
        overwritten."""
        left = self.seen + tokens_to_remove
        if 0 <= left < self.seen and self.oldest > max(left - self.window + 1, 0):
            most = max(self.seen - self.window + 1 - self.oldest, 0)
            raise ValueError(
                f"crop({tokens_to_remove}) of a cache of {self.seen} tokens, of which a layer with "
                f"a window of {self.window} holds the last {self.seen - self.oldest}: at most "
                f"{most} can be removed"
            )
        super().crop(tokens_to_remove)

    # --- blocks ---

    def block_of(self, place: Tensor) -> Tensor:
        return place % self.slots // TOKENS

    def shared(self, blocks: Tensor, counts: Tensor, filling: Tensor) -> Tensor:
        """Returns True for all blocks but the one being filled: sequences may share them until one
        begins to write to them."""
        return blocks != filling


class LocalKVLayer(SlidingKVLayer):
    """A SlidingKVLayer for a model whose masks cover all columns, such as GPT-Neo: `update` returns
    them all."""

    is_sliding = False
