"""Layers with a window hold it and no more: texts of many windows, by programs and by modules."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

import qfx
from qfx.generate import load_programs, save_programs
from qfx.hf.kv_layer import KVLayer
from qfx.ops.kv_blocks import ring_slots
from tests.lib.decoders import WINDOW, by_modules, decoder, ids
from tests.lib.pairs import every, usual

LENGTH, NEW = 560, 250
SLOTS = ring_slots(WINDOW)  # 160
LENGTHS = (3, 170, 290, 40)
TEXTS = [ids(1, count, 70 + i)[0] for i, count in enumerate(LENGTHS)]
CUTS = [16] * 6 + [4] * 12 + [1] * 60 + [16] * 6 + [1] * 60 + [2, 3, 16, 15, 1, 1] + [1] * 160
HOW: dict[str, Any] = {
    "max_new_tokens": NEW,
    "do_sample": False,
    "pad_token_id": 0,
    "return_dict_in_generate": True,
    "output_logits": True,
    "output_scores": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {},
    "mistral": {},  # no other layers
    "gpt-neo": {},  # masks of its own
    "gemma2": {"config": "w4a8", "key_bits": 4, "value_bits": 4},  # scores with a softcap
}
USUAL = usual(["gpt-neo", "gemma2"], MODELS)  # others have tests with gemma3 below
RINGS = {"gemma3": [0], "mistral": [0, 1], "gpt-neo": [1], "gemma2": [0]}


def compiled(name: str, **others: Any) -> Any:
    made = decoder(name, max_position_embeddings=1024)
    made.rings = RINGS[name]
    how = {"max_length": LENGTH, "batch_sizes": (1, 4)} | MODELS[name] | others
    return qfx.compile_for_generate(made, **how)


@pytest.fixture(scope="module", params=USUAL)
def model(request: pytest.FixtureRequest) -> Any:
    return compiled(request.param)


@pytest.fixture(scope="module")
def gemma() -> Any:
    return compiled("gemma3")


def parts(text: Tensor, cuts: list[int]) -> list[Tensor]:
    """[B, T] as pieces of these lengths, and what is left as a last one."""
    left = text.shape[1] - sum(cuts)
    return list(text.split([*cuts, left] if left else cuts, 1))


@torch.no_grad()
def read(model: Any, cache: Any, text: Tensor, cuts: list[int], **others: Any) -> Tensor:
    """Logits [B, T, V], some tokens at a time."""
    how = {"past_key_values": cache, "use_cache": True, **others}
    return torch.cat([model(input_ids=t, **how).logits for t in parts(text, cuts)], 1)


def whole(model: Any) -> Cache:
    """A cache that holds all tokens in all layers."""
    layers = [KVLayer(LENGTH, *model.forward.bits) for _ in model.forward.layout.layers]
    return Cache(layers=layers)  # type: ignore[arg-type]


def check_alike(found: Tensor, expected: Tensor) -> None:
    """Of codes that are the same, in other orders of sums: a code of an activation is one off."""
    errors = (found - expected).double().norm(dim=-1) / expected.double().norm(dim=-1)
    assert errors.max() < 0.025
    assert (found.argmax(-1) == expected.argmax(-1)).double().mean() > 0.97


def padded(which: list[int]) -> tuple[Tensor, Tensor]:
    """Tokens and mask [B, T], filled up on the left."""
    width = max(LENGTHS[i] for i in which)
    tokens, mask = torch.zeros(2, len(which), width, dtype=torch.int64)
    for row, i in enumerate(which):
        tokens[row, width - LENGTHS[i] :] = TEXTS[i]
        mask[row, width - LENGTHS[i] :] = 1
    return tokens, mask


def test_a_ring_has_the_bytes_of_its_slots(model: Any) -> None:
    cache = DynamicCache()
    read(model, cache, TEXTS[2][None], [])
    for i, layer in enumerate(cache.layers):
        slots = SLOTS if i in model.rings else LENGTH
        size = layer.key_scale.numel() // layer.shape[0]  # type: ignore[attr-defined]
        scales = layer.key_scale.shape[-1]  # type: ignore[attr-defined]
        assert size == slots * scales and layer.tensors[2].shape[2] == slots  # type: ignore[attr-defined]


def test_a_cache_of_few_tokens_has_no_rings() -> None:
    model = compiled("gemma3", max_length=SLOTS, batch_sizes=(1,))
    assert model.forward.layout.slots == (SLOTS,)
    cache = DynamicCache()
    read(model, cache, TEXTS[0][None], [])
    assert {type(layer) for layer in cache.layers} == {KVLayer}


def test_programs_of_rings_give_what_modules_do_of_all_tokens(
    model: Any, ran: list[tuple[int, ...]]
) -> None:
    text = ids(1, sum(CUTS), 3)
    found = read(model, DynamicCache(), text, CUTS)
    assert len(ran) == len(CUTS) - 1  # programs ran
    cache = whole(model)
    with by_modules(model):
        check_alike(found, read(model, cache, text, CUTS))


def test_modules_and_programs_take_turns(model: Any) -> None:
    """On one cache: modules where hidden states are asked for, with long and short steps."""
    text = ids(1, 500, 4)
    cuts = [150, 1, 1, 180, 16, 16, 1, 1, 130, 4]
    cache, found = DynamicCache(), []
    for i, part in enumerate(parts(text, cuts)):
        found.append(read(model, cache, part, [], output_hidden_states=i % 2 == 1))
    cache = whole(model)
    with by_modules(model):
        check_alike(torch.cat(found, 1), read(model, cache, text, cuts))


def test_a_text_is_the_same_whatever_is_beside_it(model: Any, ran: list[tuple[int, ...]]) -> None:
    def logits(which: list[int]) -> Tensor:
        tokens, mask = padded(which)
        return torch.stack(model.generate(tokens, attention_mask=mask, **HOW).logits, 1)

    alone = [logits([i]) for i in range(len(TEXTS))]
    for which in ([0, 1, 2], [3, 2, 1, 0]):
        ran.clear()
        found = logits(which)
        assert len(ran) == NEW - 1
        for row, i in zip(found, which, strict=True):
            assert torch.equal(row, alone[i][0])


@pytest.mark.parametrize("model, beams", every(USUAL, [2, 3]), indirect=["model"], scope="module")
def test_beams_by_the_table_are_those_of_copies(
    model: Any, beams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, mask = padded([1, 0])
    how = HOW | {"num_beams": beams, "num_return_sequences": 2}
    by_table = model.generate(tokens, attention_mask=mask, **how)
    monkeypatch.setattr(KVLayer, "reorder_cache", KVLayer.batch_select_indices)
    by_copies = model.generate(tokens, attention_mask=mask, **how)
    assert torch.equal(by_table.sequences, by_copies.sequences)
    assert torch.equal(by_table.sequences_scores, by_copies.sequences_scores)


def test_drafts_are_taken_back(model: Any) -> None:
    prompt, draft = ids(1, 9), decoder("llama")
    draft.generation_config.num_assistant_tokens = 6
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    how = HOW | {"max_new_tokens": 400}
    expected = model.generate(prompt, **how).sequences
    for more in ({"prompt_lookup_num_tokens": 5}, {"assistant_model": draft}):
        assert torch.equal(model.generate(prompt, **how, **more).sequences, expected)


def test_more_is_taken_back_than_is_held(gemma: Any) -> None:
    text = ids(1, 400, 6)
    cache, most = DynamicCache(), SLOTS - WINDOW + 1
    read(gemma, cache, text, [], logits_to_keep=1)
    again = copy.deepcopy(cache)
    again.crop(-most)
    found = read(gemma, again, text[:, -most:], [16] * 9)
    straight = DynamicCache()
    read(gemma, straight, text[:, :-most], [], logits_to_keep=1)
    assert torch.equal(found, read(gemma, straight, text[:, -most:], [16] * 9))
    with pytest.raises(ValueError, match=f"holds the last {SLOTS}: at most {most} can be removed"):
        cache.crop(-most - 1)


def test_layers_of_which_a_crop_changed_some_are_refused() -> None:
    model = compiled("gemma3", batch_sizes=(1,))
    cache = DynamicCache()
    read(model, cache, ids(1, 400), [])
    cache.layers[1].crop(-200)
    with pytest.raises(ValueError, match="hold 400 and 200 tokens"):
        read(model, cache, ids(1, 1), [])


def test_what_a_failed_call_has_overwritten_is_missed(gemma: Any) -> None:
    text = ids(1, 200, 8)
    wrong = torch.cat([text, torch.full((1, 1), 5000)], 1)
    short, long = DynamicCache(), DynamicCache()
    for cache, count in ((short, 100), (long, 200)):
        read(gemma, cache, text, [])
        with pytest.raises(IndexError), torch.no_grad():
            gemma(wrong[:, -count:], past_key_values=cache, use_cache=True, logits_to_keep=1)
    fresh = DynamicCache()
    read(gemma, fresh, text, [])
    more = ids(1, 20, 9)
    assert torch.equal(*(read(gemma, cache, more, [16]) for cache in (short, fresh)))
    with pytest.raises(ValueError, match=r"cache holds 200 tokens, .* a window of 8 has those"):
        read(gemma, long, more, [])


@pytest.mark.parametrize("way", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies_go_on(gemma: Any, way: Any) -> None:
    cache = DynamicCache()
    read(gemma, cache, ids(2, 300, 1), [], logits_to_keep=1)
    cache.reorder_cache(torch.tensor([1, 0]))
    other, more = way(cache), ids(2, 60, 2)
    assert torch.equal(*(read(gemma, c, more, [16, 16, 16]) for c in (cache, other)))


def test_a_copy_of_the_model_goes_on(gemma: Any) -> None:
    found = [m.generate(TEXTS[2][None], **HOW).sequences for m in (gemma, copy.deepcopy(gemma))]
    assert torch.equal(*found)


def test_a_token_that_a_later_mask_hides(model: Any) -> None:
    """In a window, at a place whose slot held another token before, and as long as it is there."""
    text, more = ids(2, 330, 4), ids(2, 12, 5)
    seen = torch.ones(2, 342, dtype=torch.int64)
    seen[0, 325:328] = 0
    seen[0, 20:25] = 0  # slots that were taken again, of which the tokens are seen

    def said(cache: Any) -> Tensor:
        read(model, cache, text, [])
        steps = []
        for at in range(330, 342):
            how = {"attention_mask": seen[:, : at + 1], "position_ids": torch.full((2, 1), at)}
            steps.append(read(model, cache, more[:, at - 330 : at - 329], [], **how))
        return torch.cat(steps, 1)

    found = said(DynamicCache())
    cache = whole(model)
    with by_modules(model):
        check_alike(found, said(cache))


@pytest.mark.parametrize("name", usual(["gemma3"], ["gemma3", "mistral"]))
def test_a_file(name: str, tmp_path: Path) -> None:
    """Far beyond the window, with texts of different lengths, and copies that go on."""
    model = compiled(name, batch_sizes=(2,))
    save_programs(model, tmp_path / "programs", batch_size=2)
    loaded = load_programs(tmp_path / "programs")
    tokens, mask = padded([2, 1])
    expected = model.generate(tokens, attention_mask=mask, **HOW).sequences[:, tokens.shape[1] :]
    logits = loaded.read(tokens, mask)
    found = [logits.argmax(-1)]
    for step in range(NEW - 1):
        if step == 120:
            loaded = pickle.loads(pickle.dumps(copy.deepcopy(loaded)))
        found.append(loaded.read(found[-1][:, None]).argmax(-1))
    assert torch.equal(torch.stack(found, 1), expected)


def test_a_file_says_what_a_failed_read_has_overwritten(tmp_path: Path) -> None:
    model = compiled("mistral", batch_sizes=(1,))
    save_programs(model, tmp_path / "programs")
    loaded, fresh = (load_programs(tmp_path / "programs") for _ in range(2))
    text = ids(1, 200, 8)
    wrong = torch.cat([text, torch.full((1, 1), 5000)], 1)
    for each in (loaded, fresh):
        each.read(text)
    with pytest.raises(IndexError):
        loaded.read(wrong[:, -100:])
    assert torch.equal(*(each.read(text[:, :20]) for each in (loaded, fresh)))
    with pytest.raises(IndexError):
        loaded.read(wrong)
    with pytest.raises(ValueError, match=r"read that failed has written .* call reset\(\)"):
        loaded.read(text[:, :1])
    loaded.reset()
    fresh.reset()
    assert torch.equal(*(each.read(text) for each in (loaded, fresh)))
