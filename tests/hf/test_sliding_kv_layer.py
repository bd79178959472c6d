"""SlidingKVLayer holds what a layer of all tokens does, as far as its window reaches."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from qfx.hf import KVCache
from qfx.hf.kv_layer import KVLayer
from qfx.hf.sliding_kv_layer import LocalKVLayer, SlidingKVLayer
from qfx.ops.kv_blocks import LARGEST_STEP, TOKENS, ring_slots
from tests.lib.decoders import WINDOW, decoder, ids
from tests.lib.pairs import every
from tests.lib.strategies import SEEDS

HEADS, FEATURES, LONG = 2, 16, 8192
COUNTS = st.sampled_from([1, 1, 2, 15, 16, 17, 70, 127, 128, 200, 500])
OPERATIONS = ("update", "step", "step", "reorder", "select", "repeat", "crop", "make_room", "copy")
ops = torch.ops.qfx


def drawn(texts: int, count: int) -> Tensor:
    return torch.randn(texts, HEADS, count, FEATURES)


def filled(count: int, window: int = WINDOW, capacity: int | None = LONG) -> SlidingKVLayer:
    layer = SlidingKVLayer(window, capacity)
    layer.update(*[drawn(1, count)] * 2)
    return layer


class _Pair:
    """A ring and a layer of all tokens, to which the same is done."""

    def __init__(self, texts: int, window: int, capacity: int | None) -> None:
        self.ring, self.whole = SlidingKVLayer(window, capacity), KVLayer(LONG)
        self.update(drawn(texts, 3))

    def both(self, operation: str, *args: Any) -> None:
        for layer in (self.ring, self.whole):
            getattr(layer, operation)(*args)

    def update(self, keys: Tensor) -> None:
        first = max(self.ring.seen - self.ring.window + 1, 0)
        sizes = self.ring.get_mask_sizes(keys.shape[2])
        mine, expected = (layer.update(keys, -keys) for layer in (self.ring, self.whole))
        assert sizes == (self.ring.seen - first, first)
        held = torch.ones(len(keys), self.ring.seen - first, dtype=torch.bool)
        if self.ring.kept is not None:
            held = self.ring.kept[:, first:]
        for a, b in zip(mine, expected, strict=True):
            assert a.shape[2] == sizes[0]
            assert torch.equal(a.transpose(1, 2)[held], b[:, :, first:].transpose(1, 2)[held])

    def step(self, count: int, padding: bool | Tensor) -> None:
        """As programs do: all tokens are written, then each of them reads its window. `padding`:
        whether some are none, or which are tokens, bool [texts, count]."""
        ring, whole, texts = self.ring, self.whole, self.ring.batch
        seen = ring.seen + count
        kept = padding if isinstance(padding, Tensor) else torch.rand(texts, count) < 0.7
        if padding is False:
            kept = torch.ones_like(kept)
        if padding is not False and ring.kept is None:
            self._keep(kept.new_ones(texts, ring.seen))
        held = ring.seen if ring.kept is None else ring.kept.sum(1, keepdim=True)
        places = torch.where(kept, held + kept.cumsum(1) - 1, -1)
        keys = drawn(texts, count)
        rows = torch.nn.functional.pad(places, (0, 0, 0, len(ring.tensors[1]) - texts), value=-1)
        ring.enter(rows, seen)
        slots = torch.where(kept, places % ring.slots, -1)
        for layer, where in ((ring, slots), (whole, places)):
            ops.kv_write(*(t[:texts] for t in layer.tensors), keys, -keys, where)
        found, expected = (
            ops.kv_keys(*layer.tensors[:2], layer.tensors[1].shape[2], torch.float32, layer.table)
            for layer in (ring, whole)
        )
        for b in range(texts):
            for query in places[b][kept[b]].tolist():
                window = torch.arange(max(query - ring.window + 1, 0), query + 1)
                assert torch.equal(found[b, :, window % ring.slots], expected[b, :, window])
        if ring.kept is not None:
            self._keep(torch.cat([ring.kept, kept], 1))
        ring.seen = whole.seen = seen

    def _keep(self, kept: Tensor) -> None:
        self.ring.kept = self.whole.kept = kept


@given(st.data(), st.integers(1, 3), st.integers(1, 40), SEEDS)
def test_a_ring_holds_what_a_layer_of_all_tokens_does(
    data: Any, texts: int, window: int, seed: int
) -> None:
    """The same codes, whatever is done to both in turn, over several rounds."""
    torch.manual_seed(seed)
    pair = _Pair(texts, window, LONG)
    ring = pair.ring
    for operation in data.draw(st.lists(st.sampled_from(OPERATIONS), min_size=3, max_size=14)):
        several = st.lists(st.integers(0, ring.batch - 1), min_size=ring.batch, max_size=ring.batch)
        if operation == "update":
            pair.update(drawn(ring.batch, data.draw(COUNTS)))
        elif operation == "step":
            count = min(data.draw(COUNTS), LARGEST_STEP)
            pair.step(count, data.draw(st.sampled_from([False, False, False, True])))
        elif operation == "reorder":
            pair.both("reorder_cache", torch.tensor(data.draw(several)))
        elif operation == "select":
            some = data.draw(several)[: data.draw(st.integers(1, ring.batch))]
            pair.both("batch_select_indices", torch.tensor(some))
        elif operation == "repeat" and ring.batch == 1:
            pair.both("batch_repeat_interleave", 3)
        elif operation == "make_room":
            pair.both("make_room", ring.batch + data.draw(st.integers(0, 2)))
        elif operation == "copy":
            pair.ring = ring = data.draw(st.sampled_from([copy.deepcopy, again]))(ring)
        elif operation == "crop":
            cropped(pair, data.draw(st.integers(0, min(ring.seen - 1, 200))))
        assert ring.tensors[1].shape[2] == ring_slots(window)
    pair.update(drawn(ring.batch, 1))


def again(layer: Any) -> Any:
    return pickle.loads(pickle.dumps(layer))


def cropped(pair: _Pair, count: int) -> None:
    """Where it can be; that is at least as many as a step has, behind a step."""
    before = pair.ring.oldest
    try:
        pair.ring.crop(-count)
    except ValueError as why:
        assert "can be removed" in str(why) and pair.ring.oldest == before
        assert before > max(pair.ring.seen - count - pair.ring.window + 1, 0)
    else:
        pair.whole.crop(-count)


@pytest.mark.parametrize("seed, padding", every(range(4), [False, True]))
def test_beams_go_round_the_ring(seed: int, padding: bool) -> None:
    """Several rounds, reordered before each step, of texts that share most blocks."""
    torch.manual_seed(seed)
    pair = _Pair(3, 24, LONG)
    for _ in range(40):
        pair.both("reorder_cache", torch.randint(0, 3, (3,)))
        pair.step(int(torch.randint(1, 40, ())), padding)
    assert pair.ring.seen > 3 * pair.ring.slots


def test_a_text_that_stays_behind_keeps_what_it_reads() -> None:
    """It shares blocks with one that comes round the ring to them."""
    pair = _Pair(2, WINDOW, LONG)
    pair.step(45, False)
    pair.both("reorder_cache", torch.tensor([0, 0]))
    alone = torch.tensor([[True], [False]])
    for _ in range(2 * pair.ring.slots):
        pair.step(1, alone)
    pair.step(20, False)


def test_a_text_that_becomes_a_shorter_one() -> None:
    """While another reads its blocks."""
    pair = _Pair(3, WINDOW, LONG)
    pair.step(100, torch.tensor([True, True, False])[:, None].expand(3, 100))
    pair.step(3, False)
    for indices in ([0, 0, 2], [2, 1, 2]):
        pair.both("reorder_cache", torch.tensor(indices))
        pair.step(5, False)
        pair.step(60, torch.tensor([True, False, False])[:, None].expand(3, 60))
    pair.update(drawn(3, 1))


@pytest.mark.parametrize("more, window", every([-1, 0, 1, 2, 20], [8, 100]))
def test_tokens_that_nearly_fill_the_ring(window: int, more: int) -> None:
    """The first of them sees the tokens before."""
    pair = _Pair(1, window, LONG)
    pair.update(drawn(1, 2 * pair.ring.slots))
    pair.update(drawn(1, pair.ring.slots - window + more))
    pair.update(drawn(1, 1))


def test_beams_give_up_the_rest_of_a_block() -> None:
    """So fewer tokens can be taken back."""
    pair = _Pair(2, WINDOW, LONG)
    pair.step(128, False)
    pair.step(125, False)  # 256 tokens
    pair.both("reorder_cache", torch.tensor([1, 0]))
    pair.step(1, False)
    most = pair.ring.slots - WINDOW + 1 - (TOKENS - 1)
    with pytest.raises(ValueError, match=f"at most {most} can be removed"):
        pair.ring.crop(-most - 1)
    pair.both("crop", -most)
    pair.update(drawn(2, 1))


def test_what_was_overwritten_is_not_read() -> None:
    layer = filled(400)
    layer.enter(torch.arange(400, 600)[None], 600)  # a program, which was cut off
    with pytest.raises(ValueError, match=r"holds 400 tokens, .* has those from 440 on"):
        layer.update(*[drawn(1, 1)] * 2)


@pytest.mark.parametrize("window, count", every([1, 8, 16, 31], [3, 400, 1000]))
def test_as_many_tokens_are_taken_back_as_are_held(count: int, window: int) -> None:
    layer = filled(count, window)
    slots = layer.slots
    most = count if count <= slots else slots - window + 1
    if most < count:
        with pytest.raises(ValueError, match=rf"crop\({-most - 1}\) .* at most {most} can be"):
            layer.crop(-most - 1)
        assert layer.seen == count
    layer.crop(-most)
    assert layer.seen == count - most
    if most < count:
        with pytest.raises(ValueError, match="at most 0 can be removed"):
            layer.crop(-1)


def test_what_is_cropped_twice_counts_from_what_was_written() -> None:
    layer = filled(400)
    layer.crop(-100)
    layer.update(*[drawn(1, 60)] * 2)
    most = layer.slots - WINDOW + 1 - 40
    with pytest.raises(ValueError, match=f"at most {most} can be removed"):
        layer.crop(-most - 1)
    layer.crop(-most)


@pytest.mark.parametrize("window", [1, 2, 16, 4096])
def test_slots_are_enough_and_few(window: int) -> None:
    slots = ring_slots(window)
    assert slots % TOKENS == 0
    assert 0 <= slots - (window + LARGEST_STEP + TOKENS) < TOKENS


@pytest.mark.parametrize("capacity", [None, LONG])
def test_bytes_of_a_ring(capacity: int | None) -> None:
    """Those of its slots, however long the text is; a growing one begins with fewer."""
    layer = SlidingKVLayer(1000, capacity)
    sizes = []
    for count in (10, 300, 3000, 1):
        layer.update(*[drawn(1, count)] * 2)
        sizes.append(sum(t.nbytes for t in layer.tensors) // (2 * HEADS * (FEATURES + 4)))
    assert sizes == ([256, 512, 1152, 1152] if capacity is None else [1152] * 4)


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="a window of 0 tokens"):
        SlidingKVLayer(0)


def test_beyond_the_capacity_nothing_is_written() -> None:
    layer = SlidingKVLayer(WINDOW, 400)
    layer.update(*[drawn(1, 390)] * 2)
    before = [t.clone() for t in layer.tensors]
    with pytest.raises(ValueError, match="room for 400 tokens and would hold 401"):
        layer.update(*[drawn(1, 11)] * 2)
    assert all(map(torch.equal, before, layer.tensors)) and layer.seen == 390


def test_a_layer_whose_masks_are_of_all_columns_returns_them() -> None:
    layer = LocalKVLayer(WINDOW)
    keys = drawn(1, 600)
    for part in keys.split([500, 99, 1], 2):
        found = layer.update(part, part)[0]
        seen = layer.seen
        assert found.shape[2] == seen and layer.get_mask_sizes(1) == (seen + 1, 0)
        window = slice(seen - WINDOW, seen)
        error = (found[:, :, window] - keys[:, :, window]).norm()
        assert error < 0.02 * keys[:, :, window].norm()


def test_masks_have_the_columns_that_transformers_has() -> None:
    mine, own = SlidingKVLayer(WINDOW), DynamicSlidingWindowLayer(WINDOW)
    for count in (1, 3, 3, 1, 1, 4, 300, 1, 2):
        keys = drawn(1, count)
        assert mine.get_mask_sizes(count) == own.get_mask_sizes(count)
        shapes = [layer.update(keys, keys)[0].shape for layer in (mine, own)]
        assert shapes[0] == shapes[1] and mine.get_seq_length() == own.get_seq_length()


def test_reordering_a_ring_copies_at_most_one_block_of_each() -> None:
    layer = SlidingKVLayer(100, LONG)
    layer.update(*[drawn(2, 1000)] * 2)
    before = [t.clone() for t in layer.tensors]
    layer.reorder_cache(torch.tensor([1, 1]))
    changed = (layer.tensors[0] != before[0]).flatten(3).any(-1)  # [texts, HEADS, blocks]
    assert changed[0].any(0).nonzero().flatten().tolist() == [1000 % layer.slots // TOKENS]
    assert not changed[1].any()
    layer.update(*[drawn(2, 16)] * 2)  # enters a block
    assert layer.table is not None and layer.table.tolist()[0].count(0) == 2


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gemma2", "gpt-neo"])
def test_a_growing_cache_of_a_model(name: str) -> None:
    """In pieces, long and short, far beyond the window: what int8 costs is below a code's step."""
    model = decoder(name, max_position_embeddings=1024)
    cache, tokens = KVCache(model.config), ids(2, 700)
    rings = [layer for layer in cache.layers if isinstance(layer, SlidingKVLayer)]
    assert len(rings) == (2 if name == "mistral" else 1)
    parts = tokens.split([250, 1, 1, 300, 16, 1, 131], 1)
    with torch.no_grad():
        found = [model(input_ids=part, past_key_values=cache).logits for part in parts]
        expected = model(input_ids=tokens, use_cache=False).logits
    assert (torch.cat(found, 1) - expected).norm() / expected.norm() < 2 / 127
    assert cache.get_seq_length() == 700
    assert {ring.tensors[1].shape[2] for ring in rings} == {ring_slots(WINDOW)}
