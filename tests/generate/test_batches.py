"""Texts of different lengths in one batch: each is what it is alone, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import qfx
from qfx.hf import KVCache
from qfx.hf.kv_layer import KVLayer
from tests.conftest import on_threads
from tests.lib.decoders import by_modules, decoder, ids
from tests.lib.pairs import every, usual

LENGTH, NEW = 64, 12
LENGTHS = (3, 17, 30, 9, 1)
TEXTS = [ids(1, count, 50 + i)[0] for i, count in enumerate(LENGTHS)]
HOW: dict[str, Any] = {
    "max_new_tokens": NEW,
    "do_sample": False,
    "eos_token_id": None,
    "pad_token_id": 0,
    "return_dict_in_generate": True,
    "output_logits": True,
    "output_scores": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3": {},  # windows
    "qwen3": {"torch_dtype": torch.bfloat16},
    "opt": {},  # positions of its own
    "bloom": {},  # slopes, and no positions
    "gpt-neo": {},  # a mask of the model's own
    "gemma2": {"scheme": "w4a8", "key_bits": 4, "value_bits": 4},  # scores with a softcap
}


# Sliding layers and windows have their own file, which asks the same of them.
USUAL = usual(["qwen3", "opt", "bloom", "gemma2"], MODELS)


@pytest.fixture(scope="module", params=USUAL)
def model(request: pytest.FixtureRequest) -> Any:
    how = dict(MODELS[request.param])
    made = decoder(request.param).to(how.pop("torch_dtype", torch.float32))
    how = {"config": how.pop("scheme", None), "max_length": LENGTH, "batch_sizes": (1, 4), **how}
    return qfx.compile_for_generate(made, **how)


def padded(which: list[int]) -> tuple[Tensor, Tensor]:
    """Tokens and mask [B, T], filled up on the left."""
    width = max(LENGTHS[i] for i in which)
    tokens, mask = torch.zeros(2, len(which), width, dtype=torch.int64)
    for row, i in enumerate(which):
        tokens[row, width - LENGTHS[i] :] = TEXTS[i]
        mask[row, width - LENGTHS[i] :] = 1
    return tokens, mask


def logits(model: Any, which: list[int]) -> Tensor:
    """[B, NEW, V]"""
    tokens, mask = padded(which)
    found = model.generate(tokens, attention_mask=mask, **HOW)
    return torch.stack(found.logits, 1)


def test_a_text_is_the_same_whatever_is_beside_it(model: Any, ran: list[tuple[int, ...]]) -> None:
    alone = [logits(model, [i]) for i in range(len(TEXTS))]
    for which, threads in (([0, 1], 1), ([2, 0, 3], 2), ([4, 3, 2, 1, 0], 1), ([3, 3], 2)):
        ran.clear()
        with on_threads(threads):
            found = logits(model, which)
        assert len(ran) == NEW - 1  # programs ran
        for row, i in zip(found, which, strict=True):
            assert torch.equal(row, alone[i][0])


def test_fewer_texts_are_filled_up_to_the_sizes_asked_for(model: Any) -> None:
    before = {key[0] for key in model.forward.runners}  # other tests have other batches
    logits(model, [0, 1, 2])
    logits(model, [0, 1])
    assert {key[0] for key in model.forward.runners} <= before | {1, 4, 8}
    logits(model, [0, 1, 2, 3, 4])
    assert {4, 8} <= {key[0] for key in model.forward.runners} <= before | {1, 4, 8}


@pytest.mark.parametrize(
    "model, beams", every(USUAL, [2, 3, 5]), indirect=["model"], scope="module"
)
def test_beams_by_the_table_are_those_of_copies(
    model: Any, beams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, mask = padded([2, 0])
    how = HOW | {"num_beams": beams, "max_new_tokens": 25, "num_return_sequences": 2}
    by_table = model.generate(tokens, attention_mask=mask, **how)
    monkeypatch.setattr(KVLayer, "reorder_cache", KVLayer.batch_select_indices)
    by_copies = model.generate(tokens, attention_mask=mask, **how)
    assert torch.equal(by_table.sequences, by_copies.sequences)
    assert torch.equal(by_table.sequences_scores, by_copies.sequences_scores)


def test_beams_of_a_text_are_those_that_it_has_alone(model: Any) -> None:
    how = HOW | {"num_beams": 3, "num_return_sequences": 3}
    tokens, mask = padded([2, 0, 3])
    together = model.generate(tokens, attention_mask=mask, **how)
    for row, i in enumerate([2, 0, 3]):
        alone = model.generate(TEXTS[i][None], attention_mask=torch.ones(1, LENGTHS[i]), **how)
        rows = slice(3 * row, 3 * row + 3)
        assert torch.equal(together.sequences[rows, -NEW:], alone.sequences[:, -NEW:])
        assert torch.equal(together.sequences_scores[rows], alone.sequences_scores)


def test_positions_of_padding_say_nothing(model: Any) -> None:
    """OPT's own are -1 there."""
    if not model.forward.positioned:
        pytest.skip("the model takes no positions")
    tokens, mask = padded([0, 1])
    found = []
    for least in (-1, 0):
        positions = (mask.cumsum(1) - 1).clamp(min=least)
        how: dict[str, Any] = {"past_key_values": DynamicCache(), "use_cache": True}
        with torch.no_grad():
            y = model(tokens, attention_mask=mask, position_ids=positions, logits_to_keep=1, **how)
        found.append(y.logits)
    assert torch.equal(*found)


def test_modules_take_over_a_batch_with_padding(model: Any) -> None:
    """Where hidden states are asked for, they read the cache that programs wrote."""
    tokens, mask = padded([2, 0, 3])
    more = ids(3, 4, 7)
    seen = torch.cat([mask, torch.ones_like(more)], 1)
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    begun, whole = (slice(0, tokens.shape[1]), slice(tokens.shape[1], None))
    found = []
    for ask in (False, True):
        cache = DynamicCache()
        how = {"past_key_values": cache, "use_cache": True}
        with torch.no_grad():
            model(tokens, attention_mask=mask, position_ids=positions[:, begun], **how)
            how |= {"attention_mask": seen, "position_ids": positions[:, whole]}
            found.append(model(more, output_hidden_states=ask, **how).logits)
            step = {"past_key_values": cache, "use_cache": True}
            after = torch.cat([seen, seen[:, :1] * 0 + 1], 1)
            last = (after.cumsum(1) - 1)[:, -1:]
            found.append(model(more[:, :1], attention_mask=after, position_ids=last, **step).logits)
    for program, modules in zip(found[:2], found[2:], strict=True):
        error = (program - modules).double().norm() / modules.double().norm()
        assert error < 0.02


def test_a_token_that_a_later_mask_hides(model: Any) -> None:
    """As the modules do, of a cache that they read."""
    tokens, more = ids(2, 20, 4), ids(2, 1, 5)
    seen = torch.ones(2, 21, dtype=torch.int64)
    seen[0, 3:9] = 0
    positions = torch.full((2, 1), 20)

    def said(cache: Any) -> Tensor:
        how = {"past_key_values": cache, "use_cache": True}
        with torch.no_grad():
            model(tokens, **how)
            whole = model(more, attention_mask=seen, position_ids=positions, **how)
        y: Tensor = whole.logits.double()
        return y

    by_programs = said(DynamicCache())
    key_bits, value_bits = model.forward.bits
    with by_modules(model):
        same = KVCache(model.config, key_bits=key_bits, value_bits=value_bits)
        expected = said(same)
    assert (by_programs - expected).norm() / expected.norm() < 0.02
