"""A compiled model serves as its modules do: batches, beams, samples, drafts, streams, threads."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache, TextIteratorStreamer

import qfx
from qfx.generate.model_programs import ModelPrograms
from qfx.hf import KVCache
from tests.lib.decoders import by_modules, decoder, ids

LENGTH = 96
Ran = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def model() -> Any:
    return qfx.compile_for_generate(decoder("llama", num_hidden_layers=1), max_length=LENGTH)


def said(model: Any, tokens: Tensor, **how: Any) -> Any:
    """Tokens behind the prompt too."""
    how = {"max_new_tokens": 10, "do_sample": False} | how
    seen = {} if "attention_mask" in how else {"attention_mask": torch.ones_like(tokens)}
    torch.manual_seed(3)
    return model.generate(tokens, **seen, **how)


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (1, {}),
    "beams": (1, {"num_beams": 3}),
    "beams of two texts": (2, {"num_beams": 2, "num_return_sequences": 2}),
    "a sample": (1, {"do_sample": True}),
    "samples": (1, {"do_sample": True, "num_return_sequences": 3}),
    "drafts from the prompt": (1, {"prompt_lookup_num_tokens": 4, "max_new_tokens": 30}),
    "a prompt in pieces": (1, {"prefill_chunk_size": 4}),
}


SEVERAL = {"drafts from the prompt", "a prompt in pieces"}  # tokens a step


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_generate(way: str, model: Any, ran: Ran) -> None:
    batch, how = WAYS[way]
    tokens = ids(batch, 6).repeat(1, 3)
    text = said(model, tokens, **how)
    several = any(count > 1 for _, count in ran)
    assert ran and several == (way in SEVERAL)
    with by_modules(model):
        expected = said(model, tokens, past_key_values=KVCache(model.config), **how)
    assert torch.equal(text, expected)


def test_texts_of_unequal_lengths(model: Any) -> None:
    """Each as if it were alone, its mask given or found from the padding."""
    for batch in (1, 2, 3, 1):
        tokens, seen = ids(batch, 9), torch.ones(batch, 9, dtype=torch.int64)
        for row in range(batch):
            tokens[row, : 2 * row] = seen[row, : 2 * row] = 0
        texts = said(model, tokens, attention_mask=seen)
        for row, text in enumerate(texts):
            assert torch.equal(said(model, tokens[row : row + 1, 2 * row :])[0], text[2 * row :])
        assert torch.equal(model.generate(tokens, max_new_tokens=10, do_sample=False), texts)


def test_positions_of_padded_texts() -> None:
    """Of a model that adds them to its tokens: a text is not another one behind padding."""
    model = qfx.compile_for_generate(decoder("gpt2"), max_length=32)
    tokens = ids(2, 9)
    tokens[1, :4] = 0
    texts = model.generate(tokens, max_new_tokens=8, do_sample=False)
    assert torch.equal(said(model, tokens[1:, 4:], max_new_tokens=8)[0], texts[1, 4:])


def test_drafts_of_another_model(model: Any) -> None:
    draft = decoder("llama", num_hidden_layers=1)
    text = said(model, ids(1, 9))
    assert torch.equal(said(model, ids(1, 9), assistant_model=draft), text)
    with by_modules(model):
        served = model  # the large model by modules, the small one by programs
        compiled = qfx.compile_for_generate(draft, max_length=LENGTH)
        assert torch.equal(said(served, ids(1, 9), assistant_model=compiled), text)


def test_threads_get_what_they_get_alone() -> None:
    """From the first call on, which makes programs while others read prompts."""
    model = qfx.compile_for_generate(decoder("llama", num_hidden_layers=1), max_length=LENGTH)

    def ask(i: int) -> Any:
        tokens = ids(i % 2 + 1, 5 + i, i)
        return model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, do_sample=False
        )

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(8)))
    assert all(torch.equal(answer, ask(i)) for i, answer in enumerate(answers))


def test_a_stream(model: Any) -> None:
    class Tokens:
        def decode(self, tokens: Any, **options: Any) -> str:
            return "".join(f"{t} " for t in tokens)

    stream: Any = TextIteratorStreamer(Tokens())  # type: ignore[arg-type]
    thread = threading.Thread(target=said, args=(model, ids(1, 9)), kwargs={"streamer": stream})
    thread.start()
    streamed = [int(token) for token in "".join(stream).split()]
    thread.join()
    assert streamed == said(model, ids(1, 9))[0].tolist()


def test_another_conversation_makes_nothing_new(monkeypatch: pytest.MonkeyPatch, ran: Ran) -> None:
    """Of other lengths, whose prompts are read by as many rows as some before."""
    model = qfx.compile_for_generate(decoder("llama", num_hidden_layers=1), max_length=LENGTH)
    for length in (3, 9, 40):
        said(model, ids(1, length))
    monkeypatch.setattr("torch.export.export", None)
    for length in (4, 20, 37):
        ran.clear()
        assert said(model, ids(1, length)).shape == (1, length + 10)
        assert len(ran) == 9  # behind the prompt, by programs


@pytest.mark.parametrize("more", [1, 5, 20])
def test_a_conversation_goes_on(more: int, model: Any, ran: Ran) -> None:
    """Behind the cache that it returned, or a copy of that, which the answer leaves as it is."""
    first = said(model, ids(1, 9), return_dict_in_generate=True)
    tokens = torch.cat([first.sequences, ids(1, more, 7)], 1)
    ran.clear()
    held = copy.deepcopy(first.past_key_values)
    texts = [said(model, tokens, past_key_values=cache) for cache in (held, first.past_key_values)]
    assert torch.equal(*texts) and torch.equal(texts[0], said(model, tokens))
    assert ran[0] == (1, more + 1)  # its own last token comes first


def test_no_more_tokens_than_there_is_room_for(model: Any) -> None:
    assert said(model, ids(1, 9), max_new_tokens=LENGTH - 9 + 1).shape == (1, LENGTH + 1)
    heard: list[Tensor] = []
    for tokens, new, whole in ((ids(1, 9), LENGTH, 104), (ids(1, 97), 10, 106)):
        with pytest.raises(ValueError, match=f"are {whole} tokens, .* room for 96: .*="):
            said(model, tokens, max_new_tokens=new, streamer=_Heard(heard))
    assert all(len(tokens) > 1 for tokens in heard)  # the prompts alone
    with pytest.raises(ValueError, match=r"97 tokens after 0 .*max_length="), torch.no_grad():
        model(ids(1, 97), past_key_values=DynamicCache(), use_cache=True)


def test_a_longer_request_with_a_cache_of_its_own_is_served(model: Any) -> None:
    long = {"past_key_values": StaticCache(model.config, max_cache_len=200)}
    assert said(model, ids(1, 9), max_new_tokens=LENGTH, **long).shape == (1, LENGTH + 9)


class _Heard:
    """A streamer."""

    def __init__(self, heard: list[Tensor]) -> None:
        self.heard = heard

    def put(self, tokens: Tensor) -> None:
        self.heard.append(tokens.flatten())

    def end(self) -> None:
        pass


ASKED = ("scores", "logits", "hidden_states", "attentions")


@pytest.mark.parametrize("what", ASKED)
def test_what_else_is_asked_for(what: str, model: Any, ran: Ran) -> None:
    found = said(model, ids(1, 9), return_dict_in_generate=True, **{f"output_{what}": True})
    assert len(found[what]) == 10 and found[what][1] is not None
    assert bool(ran) == (what in ("scores", "logits"))
    ran.clear()
    assert torch.equal(said(model, ids(1, 9)), found.sequences)
    assert len(ran) == 9


def test_calls_that_the_modules_serve(model: Any, ran: Ran) -> None:
    caches = [StaticCache(model.config, 32), KVCache(model.config), KVCache(model.config, LENGTH)]
    for cache in caches:
        said(model, ids(1, 9), past_key_values=cache)
        assert cache.get_seq_length() == 18
    said(model, ids(1, 9), use_cache=False)
    with torch.autocast("cpu", torch.bfloat16):
        said(model, ids(1, 9))
    loss = model(ids(1, 9), labels=ids(1, 9)).loss
    loss.backward()
    assert ran == [] and model.get_input_embeddings().weight.grad.any()


def test_a_cache_that_holds_floats_stays_what_it_is(model: Any, ran: Ran) -> None:
    cache = DynamicCache(config=model.config)
    with by_modules(model), torch.no_grad():
        model(input_ids=ids(1, 5), past_key_values=cache)
    layers = list(cache.layers)
    with torch.no_grad():
        model(input_ids=ids(1, 1), past_key_values=cache)
    assert cache.layers == layers and cache.get_seq_length() == 6 and ran == []


def test_embeddings_take_the_place_of_tokens(model: Any, ran: Ran) -> None:
    embedded = model.get_input_embeddings()(ids(1, 9)).detach()
    seen = torch.ones(1, 9, dtype=torch.int64)
    text = model.generate(
        inputs_embeds=embedded, attention_mask=seen, max_new_tokens=10, do_sample=False
    )
    assert len(ran) == 9 and torch.equal(text, said(model, ids(1, 9))[:, 9:])


def test_by_hand(model: Any, ran: Ran) -> None:
    """Positional tokens, no mask, the logits that are kept."""
    cache = DynamicCache()
    with torch.no_grad():
        model(ids(1, 9), past_key_values=cache, use_cache=True)
        y = model(ids(1, 3, 1), past_key_values=cache, logits_to_keep=1, use_cache=True).logits
    assert y.shape == (1, 1, 96) and ran == [(1, 3)] and cache.get_seq_length() == 12


@pytest.mark.parametrize("count", [17, 24, 150])
def test_a_prompt_with_drafts_is_read_by_programs(count: int) -> None:
    """Assisted generation asks for the logits of the drafts behind a prompt at once."""
    model = qfx.compile_for_generate(decoder("llama", num_hidden_layers=1), max_length=160)
    tokens, found = ids(1, count), []
    for cut in (0, count - 6):
        cache = DynamicCache()
        with torch.no_grad():
            if cut:
                model(tokens[:, :cut], past_key_values=cache, use_cache=True, logits_to_keep=1)
            how = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 6}
            found.append(model(tokens[:, cut:], **how).logits)
        assert cache.get_seq_length() == count
    assert found[0].shape == (1, 6, 96) and torch.equal(*found)


def test_inference_mode(ran: Ran) -> None:
    """Programs that are made in it, and a cache that was, serve outside."""
    model = qfx.compile_for_generate(decoder("llama", num_hidden_layers=1), max_length=LENGTH)
    with torch.inference_mode():
        two = said(model, ids(2, 9), return_dict_in_generate=True)
    tokens = torch.cat([two.sequences, ids(2, 2)], 1)
    ran.clear()
    assert said(model, tokens, past_key_values=two.past_key_values).shape == (2, 31)
    assert len(ran) == 10


def test_a_new_program_stops_nobody(model: Any, ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is made, which marks the process as compiling, programs that are there run."""
    expected = said(model, ids(1, 4))
    begun, done = threading.Event(), threading.Event()
    make = ModelPrograms._made

    def waiting(programs: ModelPrograms, *args: Any) -> Any:
        begun.set()
        assert done.wait(60)
        return make(programs, *args)

    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patch:
        patch.setattr(ModelPrograms, "_made", waiting)
        other = pool.submit(said, model, ids(7, 4))
        assert begun.wait(60)
        patch.setattr("torch.compiler.is_compiling", lambda: True)
        ran.clear()
        try:
            assert torch.equal(said(model, ids(1, 4)), expected)
        finally:
            patch.undo()
            done.set()
        assert ran[:9] == [(1, 1)] * 9
        assert other.result().shape == (7, 14)
