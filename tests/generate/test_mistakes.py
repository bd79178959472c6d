"""What is wrong with one call is that caller's error: programs serve the next one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import qfx
from tests.lib.decoders import decoder, ids

Ran = list[tuple[int, ...]]
FOUR = torch.arange(4)[None]


def compiled() -> Any:
    return qfx.compile_for_generate(decoder("llama", num_hidden_layers=1), max_length=64)


@pytest.fixture(scope="module")
def model() -> Any:
    return compiled()


MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "floats for ids": ({"input_ids": ids(1, 4).float()}, RuntimeError, "indices"),
    "ids of one axis": ({"input_ids": ids(1, 4)[0]}, IndexError, "tuple index"),
    "no tokens": ({"input_ids": ids(1, 0)}, RuntimeError, "0 elements"),
    "no texts": ({"input_ids": ids(0, 4)}, RuntimeError, "0 elements"),
    "a token beyond": ({"input_ids": ids(1, 4) + 500}, IndexError, "96 of the vocabulary"),
    "a negative token": ({"input_ids": -ids(1, 4)}, IndexError, "96 of the vocabulary"),
    "positions of other tokens": (
        {"input_ids": ids(1, 4), "position_ids": FOUR[:, :3]}, RuntimeError, "match the size",
    ),
    "too many tokens": ({"input_ids": ids(1, 65)}, ValueError, "65 tokens after 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_programs_go_on_behind_a_mistake(name: str, model: Any, ran: Ran) -> None:
    given, error, message = MISTAKES[name]
    with torch.no_grad(), pytest.raises(error, match=message):
        model(past_key_values=DynamicCache(), use_cache=True, **given)
    model.generate(ids(1, 5), max_new_tokens=3, do_sample=False)
    assert ran == [(1, 1)] * 2


def test_another_number_of_texts_than_the_cache_holds(model: Any, ran: Ran) -> None:
    cache = DynamicCache()
    with torch.no_grad():
        model(input_ids=ids(4, 5), past_key_values=cache, use_cache=True)
        for texts in (8, 1):
            with pytest.raises(
                ValueError, match=f"has a batch size of 4, and these tokens have {texts}"
            ):
                model(input_ids=ids(texts, 1), past_key_values=cache, use_cache=True)
        assert cache.get_seq_length() == 5
        model(input_ids=ids(4, 1), past_key_values=cache, use_cache=True)
    assert ran == [(4, 1)]


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "int32 ids": lambda: {"input_ids": ids(1, 4).int()},
    "int32 positions": lambda: {"input_ids": ids(1, 4), "position_ids": FOUR.int()},
    "int64": lambda: {"input_ids": ids(1, 4), "position_ids": FOUR},
}


@pytest.mark.parametrize("order", [[*KINDS], [*KINDS][::-1]], ids=lambda o: o[0])
def test_integers_of_every_kind_have_the_same_programs(order: list[str]) -> None:
    model = compiled()
    found = []
    with torch.no_grad():
        for name in order:
            found.append(model(past_key_values=DynamicCache(), use_cache=True, **KINDS[name]()))
    assert all(torch.equal(each.logits, found[0].logits) for each in found)
    assert {sizes[:2] for sizes in model.forward.runners} == {(1, 1), (1, 4)}


def test_a_program_belongs_to_a_default_type() -> None:
    model = compiled()
    expected = model.generate(ids(1, 5), max_new_tokens=4, do_sample=False)
    torch.set_default_dtype(torch.float64)
    try:
        text = model.generate(ids(1, 5), max_new_tokens=4, do_sample=False)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(text, expected) and model.forward.why_none is None
    assert torch.equal(model.generate(ids(1, 5), max_new_tokens=4, do_sample=False), expected)


def test_logits_of_some_tokens(model: Any) -> None:
    """`logits_to_keep` as a tensor, of few tokens and of more than a step gives logits of."""
    for count, kept in ((4, [1, 3]), (20, [0, 19]), (20, [7])):
        with torch.no_grad():
            every, some = (
                model(
                    input_ids=ids(1, count), past_key_values=DynamicCache(), use_cache=True, **keep
                ).logits
                for keep in ({}, {"logits_to_keep": torch.tensor(kept)})
            )
        assert torch.equal(some, every[:, kept])


def test_a_model_is_freed_when_it_is_deleted() -> None:
    """At once, without a search for cycles."""
    model = compiled()
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()
