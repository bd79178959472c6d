"""What steps are told of places is what a mask says; answers are those of transformers' class."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_outputs import CausalLMOutputWithPast

from qfx.generate.masks import Places
from qfx.generate.steps import _output


@given(data=st.data())
def test_masks_say_what_each_query_sees(data: st.DataObject) -> None:
    length, batch = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 3))
    first = data.draw(st.integers(0, length - 1))
    count = data.draw(st.integers(1, length - first))
    windows = data.draw(st.lists(st.one_of(st.none(), st.integers(1, 50)), min_size=1, max_size=3))
    seen = None
    if data.draw(st.booleans()):
        bits = st.lists(st.booleans(), min_size=first + count, max_size=first + count)
        seen = torch.tensor([data.draw(bits) for _ in range(batch)])
    places = Places({str(i): w for i, w in enumerate(windows)}, length)
    found = places.masks(seen, first, batch, count)
    assert len(found) == len(windows)
    for window, mask in zip(windows, found, strict=True):
        assert mask.shape == (batch, 1, count, length) and mask.is_contiguous()
        for b in range(batch):
            for t in range(count):
                query = first + t
                sees = [
                    k <= query
                    and (window is None or k > query - window)
                    and (seen is None or k >= seen.shape[1] or bool(seen[b, k]))
                    for k in range(length)
                ]
                assert mask[b, 0, t].tolist() == sees
    assert places.numbers(first, count).tolist() == list(range(first, first + count))


@pytest.mark.parametrize("way", ["itself", "pickled", "copied", "replaced"])
def test_an_answer_is_one_of_transformers(way: str) -> None:
    logits, cache = torch.randn(1, 1, 3), {"a": torch.ones(2)}
    expected = CausalLMOutputWithPast(logits=logits, past_key_values=cache)  # type: ignore[arg-type]
    found = _output(logits, cache)  # type: ignore[arg-type]
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
