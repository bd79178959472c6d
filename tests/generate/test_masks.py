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

from qfx.generate.answer import answer
from qfx.generate.columns import columns
from qfx.generate.layout import without_rings
from qfx.generate.masks import Places
from qfx.hf.kv_layer import KVLayer


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
    length, batch = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 3))
    windows = data.draw(st.lists(st.one_of(st.none(), st.integers(1, 50)), min_size=1, max_size=3))
    places = Places(without_rings(length, {str(i): w for i, w in enumerate(windows)}, 1))
    layer, texts, first = KVLayer(length), [_Text() for _ in range(batch)], 0
    layer.texts = batch
    while first < length and data.draw(st.booleans()):
        count = data.draw(st.integers(1, length - first))
        seen = None
        if data.draw(st.booleans()):
            bits = st.lists(st.booleans(), min_size=first + count, max_size=first + count)
            seen = torch.tensor([data.draw(bits) for _ in range(batch)])
        found = columns(layer, places.numbers(first, count), seen, length)
        for b, text in enumerate(texts):
            text.held += [seen is None or bool(seen[b, first + t]) for t in range(count)]
            assert found.places[b].tolist() == [text.place(first + t) for t in range(count)]
        _check_masks(places.masks(found.places, found.hidden), windows, texts, first, seen)
        layer.seen, layer.kept, first = first + count, found.kept, first + count
    assert places.numbers(0, length).tolist() == list(range(length))


def _check_masks(
    masks: list[Tensor],
    windows: list[int | None],
    texts: list[_Text],
    first: int,
    seen: Tensor | None,
) -> None:
    for window, mask in zip(windows, masks, strict=True):
        assert mask.is_contiguous()
        for b, text in enumerate(texts):
            for t in range(mask.shape[2]):
                query = text.place(first + t)
                expected = {
                    place
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
    found = answer(logits, cache)  # type: ignore[arg-type]
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
