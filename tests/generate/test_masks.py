"""Places and masks of steps are what a mask says; answers are those of transformers' class."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from qfx.generate.cache_slots import cache_slots
from qfx.generate.layout import CacheLayout, LayerKind
from qfx.generate.masks import Places
from qfx.generate.model_output import decoder_only_output
from qfx.hf.kv_layer import KVLayer
from tests.lib.pairs import every


class _Text:
    """A text of a batch, as a list of its columns: whether they are held."""

    def __init__(self) -> None:
        self.held: list[bool] = []

    def place(self, column: int) -> int:
        return sum(self.held[:column]) if self.held[column] else -1


@given(data=st.data())
def test_a_query_sees_what_its_mask_and_window_say(data: st.DataObject) -> None:
    """Of calls in turn, whose masks may hide what earlier calls read: padding is never held, and
    a text sees its own tokens in their order."""
    length, batch = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 3))
    windows = data.draw(st.lists(st.one_of(st.none(), st.integers(1, 50)), min_size=1, max_size=3))
    most = data.draw(st.integers(1, length))  # tokens of a call, beside which a ring has a window
    kinds = {str(i): LayerKind(w, min(length, (w or length) + most)) for i, w in enumerate(windows)}
    calls = _Calls(CacheLayout(length, kinds, ("0",)), batch)
    while calls.first < length and data.draw(st.booleans()):
        count = data.draw(st.integers(1, min(length - calls.first, most)))
        seen = None
        if data.draw(st.booleans()):
            columns = calls.first + count
            bits = st.lists(st.booleans(), min_size=columns, max_size=columns)
            seen = torch.tensor([data.draw(bits) for _ in range(batch)])
        calls.check(count, seen)


@pytest.mark.parametrize("window, shown", every([1, 4, 9], [1, 0.95, 0.7]))
def test_a_query_sees_its_window_of_a_ring(window: int, shown: float) -> None:
    """Over several rounds, of calls whose masks hide some tokens, new ones and earlier ones."""
    torch.manual_seed(0)
    length, most = 90, 6
    kinds = {
        "a": LayerKind(None, length),
        "b": LayerKind(window, window + most),
        "c": LayerKind(window, length),
    }
    calls, always = (
        _Calls(CacheLayout(length, kinds, ("a", "b", "c")), 3),
        torch.rand(3, length) < shown,
    )
    assert len(calls.places.slots(torch.zeros(3, 1, dtype=torch.int64))) == 2
    while calls.first < length - most:
        count = int(torch.randint(1, most + 1, ()))
        seen = always[:, : calls.first + count]
        calls.check(count, None if shown == 1 else seen & (torch.rand(seen.shape) < 0.9))


class _Calls:
    """Calls in turn, of `batch` texts. `first`: columns before the next one."""

    def __init__(self, layout: CacheLayout, batch: int) -> None:
        self.layout, self.places, self.first = layout, Places(layout), 0
        self.layer, self.texts = KVLayer(layout.length), [_Text() for _ in range(batch)]
        self.layer.batch = batch

    def check(self, count: int, seen: Tensor | None) -> None:
        layer, texts, first, places = self.layer, self.texts, self.first, self.places
        length = self.layout.length
        found = cache_slots(layer, places.numbers(first, count), seen, length)
        for b, text in enumerate(texts):
            text.held += [seen is None or bool(seen[b, first + t]) for t in range(count)]
            assert found.places[b].tolist() == [text.place(first + t) for t in range(count)]
        masks = places.masks(found.places, found.hidden)
        _check_masks(masks, [*self.layout.kinds.values()], texts, first, seen)
        for size, slots in zip(self.layout.slots, places.slots(found.places), strict=True):
            expected = torch.where(found.places < 0, -1, found.places % size)
            assert torch.equal(slots, expected)
        self.first = layer.seen = first + count
        layer.kept = found.kept
        assert places.numbers(0, length).tolist() == list(range(length))


def _check_masks(
    masks: list[Tensor],
    kinds: list[LayerKind],
    texts: list[_Text],
    first: int,
    seen: Tensor | None,
) -> None:
    for (window, slots), mask in zip(kinds, masks, strict=True):
        assert mask.is_contiguous()
        for b, text in enumerate(texts):
            for t in range(mask.shape[2]):
                query = text.place(first + t)
                expected = {
                    place % slots
                    for column in range(len(text.held))
                    if 0 <= (place := text.place(column)) <= query
                    and (window is None or place > query - window)
                    and (seen is None or bool(seen[b, column]))
                }
                if query >= 0:
                    assert set(mask[b, 0, t].nonzero().flatten().tolist()) == expected


@pytest.mark.parametrize("way", ["itself", "pickled", "copied", "replaced"])
def test_an_answer_is_one_of_transformers(way: str) -> None:
    logits, cache = torch.randn(1, 1, 3), {"a": torch.ones(2)}
    expected = CausalLMOutputWithPast(logits=logits, past_key_values=cache)  # type: ignore[arg-type]
    found = decoder_only_output(logits, cache)  # type: ignore[arg-type]
    if way == "pickled":
        found = pickle.loads(pickle.dumps(found))
    elif way == "copied":
        found = copy.copy(found)
    elif way == "replaced":
        found, expected = (dataclasses.replace(x, loss=torch.ones(1)) for x in (found, expected))
    assert type(found) is type(expected) and list(found) == list(expected)
    for field in dataclasses.fields(expected):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        assert (one is None) is (other is None)
    assert torch.equal(found.logits, logits) and torch.equal(found["logits"], logits)
    assert torch.equal(found[len(found.to_tuple()) - 2], logits)
    assert found.past_key_values.keys() == cache.keys()
    leaves = torch.utils._pytree.tree_leaves(found)
    assert len(leaves) == len(torch.utils._pytree.tree_leaves(expected))
