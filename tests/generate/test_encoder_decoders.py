"""compile_for_generate on encoder-decoders: the steps after the first run by programs."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

import qfx
from qfx.generate import save_programs
from tests.lib.coded_attention import reading_codes
from tests.lib.decoders import by_modules
from tests.lib.encoder_decoders import (
    ENCODER_DECODERS,
    encoder_decoder,
    int8_cache,
    source,
)
from tests.lib.pairs import every, usual

NEW, LENGTH = 16, 64
STEPS = (1, 1, 3, 1, 5, 1)  # tokens of each
# What PyTorch runs between programs.
OUTSIDE = {"m2m100": "aten.cumsum.default"}
SERVED = [name for name in ENCODER_DECODERS if name != "speech2text"]
_FLOAT = torch.finfo(torch.float32).eps


def compiled(name: str, **others: Any) -> Any:
    return qfx.compile_for_generate(encoder_decoder(name), max_length=LENGTH, **others)


def empty() -> EncoderDecoderCache:
    return EncoderDecoderCache(DynamicCache(), DynamicCache())


def said(model: Any, given: dict[str, Tensor], **others: Any) -> Tensor:
    text: Tensor = model.generate(**given, max_new_tokens=NEW, do_sample=False, **others)
    return text


def logits(model: Any, given: dict[str, Tensor], cache: Any, befores: list[Any]) -> Tensor:
    """Of decoder tokens after a source, [B, tokens, V]. `cache`: one, or one for each step.
    `befores` gets the cache as it was before each step."""
    with torch.no_grad():
        encoded = model.get_encoder()(**given, return_dict=True)
        found = []
        for i, count in enumerate(STEPS):
            own = cache[i] if isinstance(cache, list) else cache
            befores.append(copy.deepcopy(own))
            tokens = torch.randint(3, 96, (2, count), generator=torch.Generator().manual_seed(i))
            step = model(
                decoder_input_ids=tokens,
                encoder_outputs=encoded,
                attention_mask=given.get("attention_mask"),
                past_key_values=own,
                use_cache=True,
            )
            found.append(step.logits)
    return torch.cat(found, 1)


# The others are Bart, or T5, with other norms or positions.
@pytest.mark.parametrize("name", usual(["t5", "umt5", "marian", "m2m100", "whisper"], SERVED))
def test_steps_give_what_the_modules_give(name: str, ran: list[tuple[int, ...]]) -> None:
    """Within float rounding, but where that tips a code: see test_decoders.py. Of two sources of
    different lengths; beside it greedy text is the same."""
    model = compiled(name)
    given = source(model, 2, (11, 7))
    befores: list[Any] = []
    ran.clear()
    found = logits(model, given, empty(), befores)
    assert [count for _, count in ran] == [*STEPS[1:]]
    outside = {each for runner in model.forward.runners.values() for each in runner.outside}
    assert OUTSIDE.get(name) in outside or not outside
    with by_modules(model):
        expected = logits(model, given, [int8_cache(2), *befores[1:]], [])
        text = said(model, given, past_key_values=int8_cache(2))
    error = (found - expected).abs().amax(-1) / expected.abs().amax(-1)
    assert error.max() <= 2 / 127 and error.median() <= 128 * _FLOAT
    assert torch.equal(said(model, given), text)


def test_modules_serve_attention_that_is_written_out(caplog: pytest.LogCaptureFixture) -> None:
    model = qfx.compile_for_generate(qfx.quantize_(encoder_decoder("speech2text")), max_length=64)
    given = source(model, 2, (96, 60))
    text = said(model, given)
    (warning,) = [r.message for r in caplog.records if r.name.startswith("qfx.generate")]
    assert "Speech2TextForConditionalGeneration" in warning and "attention is 'eager'" in warning
    with by_modules(model):
        assert torch.equal(text, said(model, given))


@pytest.mark.parametrize("name", usual(["bart"], ["t5", "bart", "whisper"]))
def test_beams_are_those_of_the_modules(name: str, ran: list[tuple[int, ...]]) -> None:
    model = compiled(name)
    given = source(model, 2, (11, 7))
    text = said(model, given, num_beams=3)
    assert len(ran) >= NEW - 2
    with by_modules(model):
        expected = said(model, given, num_beams=3, past_key_values=int8_cache(2))
    assert torch.equal(text, expected)


def test_beams_copy_no_code_of_the_source() -> None:
    model = compiled("bart")
    given, cache = source(model, 2), empty()
    befores: list[Any] = []
    logits(model, given, cache, befores)
    layer: Any = cache.cross_attention_cache.layers[0]
    before, keys = [t.data_ptr() for t in layer.tensors], layer.keys
    cache.reorder_cache(torch.tensor([1, 1]))
    assert [t.data_ptr() for t in layer.tensors] == before
    assert torch.equal(layer.keys, keys[[1, 1]]) and not torch.equal(keys[0], keys[1])


@pytest.mark.parametrize(
    "name, dtype", every(usual(["t5 v1.1"], ["bart", "whisper"]), [torch.bfloat16, torch.float16])
)
def test_16_bits(name: str, dtype: torch.dtype, ran: list[tuple[int, ...]]) -> None:
    """Programs compute in float32. The encoder runs in 16 bits: with it, they are at most as far
    from a float32 model with the same weights as the 16-bit modules are."""
    model = encoder_decoder(name).to(dtype)
    given = source(model, 2, (11, 7))
    given = {n: t.to(dtype) if t.is_floating_point() else t for n, t in given.items()}
    qfx.compile_for_generate(model, max_length=LENGTH, logits_dtype=torch.float32)
    ran.clear()
    found = logits(model, given, empty(), [])
    assert [count for _, count in ran] == [*STEPS[1:]] and not model.forward.why_none
    with by_modules(model):
        modules = logits(model, given, int8_cache(2), [])
        exact = copy.deepcopy(model).float()
        given = {n: t.float() if t.is_floating_point() else t for n, t in given.items()}
        expected = logits(exact, given, int8_cache(2), [])
    assert found.dtype == torch.float32
    # beside the encoder's error, codes that tip differ: a third of what the modules err by
    assert (found - expected).norm() <= 1.33 * (modules - expected).norm()


def test_a_source_that_is_too_long_is_an_error_of_its_call(ran: list[tuple[int, ...]]) -> None:
    model = compiled("t5", max_source_length=8)
    with pytest.raises(ValueError, match=r"11 positions, .* room for 8: .*max_source_length"):
        said(model, source(model, 1))
    short = {name: t[:, :8] for name, t in source(model, 1).items()}
    ran.clear()
    said(model, short)
    assert len(ran) == NEW - 1


def test_a_decoder_without_a_mask_reads_whole_sources(
    ran: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    """Whisper's: others are read by the modules, which a warning says once."""
    model = compiled("whisper", max_source_length=64)
    given = source(model, 1)
    ran.clear()
    with reading_codes():
        text = said(model, given)
    assert ran == []
    (warning,) = [r.message for r in caplog.records if r.name.startswith("qfx.generate")]
    assert "source of 48 positions" in warning and "max_source_length=48" in warning
    with by_modules(model):
        assert torch.equal(text, said(model, given, past_key_values=int8_cache(2)))


def test_padding_of_the_decoder_is_read_by_the_modules(ran: list[tuple[int, ...]]) -> None:
    model = compiled("bart")
    given = source(model, 2)
    ran.clear()
    tokens = torch.tensor([[2, 5, 9], [0, 2, 7]])
    how = {"decoder_input_ids": tokens, "decoder_attention_mask": (tokens != 0).long()}
    with reading_codes():
        text = said(model, given | how)
    assert ran == []
    with by_modules(model):
        assert torch.equal(text, said(model, given | how, past_key_values=int8_cache(2)))


def test_a_draft_of_another_model(ran: list[tuple[int, ...]]) -> None:
    """Crops the cache, and has steps of several tokens."""
    model, draft = compiled("bart"), encoder_decoder("bart")
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    given = source(model, 1)
    text = said(model, given)
    ran.clear()
    assert torch.equal(said(model, given, assistant_model=draft), text)
    assert max(count for _, count in ran) > 1


def test_the_last_positions_of_a_decoder() -> None:
    """Steps of several tokens are filled up, not beyond the positions that it has embeddings for:
    M2M100 counts tokens of padding too."""
    for name in ("bart", "m2m100"):
        model = compiled(name)
        given = source(model, 1)
        with torch.no_grad():
            encoded, cache = model.get_encoder()(**given), empty()
            tokens = torch.full((1, 1), 5)
            for count in (1, *[10] * 6, 3):
                model(
                    decoder_input_ids=tokens.expand(1, count),
                    encoder_outputs=encoded,
                    attention_mask=given["attention_mask"],
                    past_key_values=cache,
                    use_cache=True,
                )
        assert cache.get_seq_length() == 64 and model.forward.why_none is None


def test_malformed_calls_are_errors_of_their_own(ran: list[tuple[int, ...]]) -> None:
    model = compiled("t5")
    given, cache = source(model, 2), empty()
    logits(model, given, cache, [])
    with torch.no_grad():
        encoded = model.get_encoder()(**source(model, 3))
        with pytest.raises(
            ValueError, match="the cache has a batch size of 2, and these tokens have 3"
        ):
            model(
                decoder_input_ids=torch.full((3, 1), 5),
                encoder_outputs=encoded,
                past_key_values=cache,
                use_cache=True,
            )
    ran.clear()
    said(model, given)
    assert len(ran) == NEW - 1
    with pytest.raises(ValueError, match="78 tokens, and the cache has room for 64"):
        model.generate(**given, max_new_tokens=78)


def test_what_of_a_source_is_seen_follows_the_cache_and_the_mask() -> None:
    """Texts that are repeated in a cache, without a mask, and a mask that is edited in place."""
    model, token = compiled("bart", batch_sizes=(4,)), torch.full((1, 1), 5)
    given = source(model, 1)
    with torch.no_grad():
        encoded = model.get_encoder()(**given)
        hidden = encoded.last_hidden_state

        def step(cache: Any, texts: int, mask: Tensor | None) -> Tensor:
            encoded.last_hidden_state = hidden.expand(texts, -1, -1)
            found: Tensor = model(
                decoder_input_ids=token.expand(texts, 1),
                encoder_outputs=encoded,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
            ).logits
            return found

        cache = empty()
        step(cache, 1, None), step(cache, 1, None)
        cache.batch_repeat_interleave(3)
        first, second, third = step(cache, 3, None)
        assert torch.equal(first, second) and torch.equal(first, third)
        kept, edited = empty(), empty()
        mask = given["attention_mask"]
        for each in (kept, edited):
            step(each, 1, mask), step(each, 1, mask)
        expected = step(kept, 1, mask)
        mask[:, 6:] = 0
        assert not torch.equal(step(edited, 1, mask), expected)


def test_copies_pickles_and_the_end_of_a_model() -> None:
    model = compiled("t5")
    given = source(model, 1)
    text = said(model, given)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(said(other, given), text) and other.forward.runners
    gone = weakref.ref(model)
    del model
    assert gone() is None or gc.collect() == 0
    assert gone() is None


def test_changed_weights_make_programs_anew() -> None:
    model = compiled("bart")
    given = source(model, 1)
    text = said(model, given)
    state = copy.deepcopy(model.state_dict())
    other = qfx.quantize_(encoder_decoder("bart", seed=1))
    model.load_state_dict(other.state_dict())
    changed = said(model, given)
    with by_modules(model):
        assert torch.equal(changed, said(model, given, past_key_values=int8_cache(2)))
    model.load_state_dict(state)
    assert torch.equal(said(model, given), text) and not torch.equal(changed, text)


def test_files_are_of_decoders_alone(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="T5ForConditionalGeneration has an encoder"):
        save_programs(compiled("t5"), tmp_path / "programs")


def test_a_peft_adapter(ran: list[tuple[int, ...]]) -> None:
    peft = pytest.importorskip("peft")
    model = qfx.quantize_(encoder_decoder("t5"))
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q", "v"], r=4)).eval()
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.5)
    qfx.compile_for_generate(wrapped, max_length=LENGTH)
    given = source(model, 1)
    ran.clear()
    text = said(wrapped, given)
    assert len(ran) == NEW - 1
    inner = wrapped.get_base_model()
    with by_modules(inner):
        assert torch.equal(text, said(wrapped, given, past_key_values=int8_cache(2)))
    with wrapped.disable_adapter():
        assert not torch.equal(text, said(wrapped, given))


def test_transformers_still_counts_on_the_names_that_are_read() -> None:
    """Of arguments, by which a call of an encoder-decoder is read."""
    import inspect

    for kind in ("T5", "Bart", "Whisper"):
        model = getattr(transformers, f"{kind}ForConditionalGeneration")
        names = inspect.signature(model.forward).parameters
        assert {"decoder_input_ids", "encoder_outputs", "decoder_attention_mask"} <= {*names}
