"""KVCache: int8 keys and values for models as transformers runs them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import qfx
from qfx.hf import KVCache
from tests.lib.decoders import by_modules, decoder, ids
from tests.lib.pairs import every

LENGTHS = [None, 48]


@pytest.fixture(scope="module")
def model() -> Any:
    return decoder("llama")


def filled(model: Any, cache: Any, tokens: Tensor) -> Tensor:
    """The logits of the tokens behind what the cache holds."""
    with torch.no_grad():
        y: Tensor = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits
    return y


@pytest.mark.parametrize("length, name", every(LENGTHS, ["llama", "mistral", "gemma3"]))
def test_a_text_in_pieces_is_the_text(name: str, length: int | None) -> None:
    """Windows too: a mask hides what they leave out. What int8 costs is below a code's step."""
    model = decoder(name)
    cache, tokens = KVCache(model.config, length), ids(2, 20)
    y = torch.cat([filled(model, cache, part) for part in tokens.split([12, 1, 1, 5, 1], 1)], 1)
    expected = filled(model, None, tokens)
    assert (y - expected).norm() / expected.norm() < 2 / 127
    assert cache.get_seq_length() == 20 and len(cache) == 2
    assert cache.is_compileable == (length is not None)


def test_what_transformers_does_with_rows(model: Any) -> None:
    """Grown over its first room, cropped, repeated, selected, forgotten."""
    cache = KVCache(model.config)
    for i in range(5):
        filled(model, cache, ids(2, 60, i))
    other = copy.deepcopy(cache)
    cache.crop(-50)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0, 1, 2]))
    cache.batch_select_indices(torch.tensor([0, 1]))
    assert cache.get_seq_length() == 250
    other.crop(-50)
    other.batch_select_indices(torch.tensor([1, 0]))
    assert torch.equal(*(filled(model, c, ids(1, 3).repeat(2, 1)) for c in (cache, other)))
    cache.reset()
    assert cache.get_seq_length() == 0
    fresh = KVCache(model.config)
    assert torch.equal(*(filled(model, c, ids(3, 4)) for c in (cache, fresh)))
    with pytest.raises(ValueError, match=r"crop\(-9\) of a cache of 4 tokens"):
        cache.crop(-9)
    KVCache(model.config).crop(-9)  # nothing, as of a DynamicCache


@pytest.mark.parametrize(("bits", "most"), [(8, 0.27), (4, 0.16)])
@pytest.mark.parametrize("d", [64, 128])
def test_bytes_of_a_token(bits: int, most: float, d: int) -> None:
    config = copy.deepcopy(decoder("llama").config)
    cache = KVCache(config, 16, key_bits=bits, value_bits=bits)
    k = torch.randn(1, 2, 16, d)
    cache.update(k, k, 0)
    layer: Any = cache.layers[0]
    size = sum(t.nbytes for t in layer.tensors)
    assert size <= most * 2 * k.nbytes and size == 2 * 2 * 16 * (d * bits // 8 + 32 // bits)


REFUSED = {
    "bits": ({"key_bits": 3}, "key_bits=3"),
    "bits of values": ({"value_bits": 16}, "value_bits=16"),
    "no room": ({"max_cache_len": 0}, "room for 0 tokens"),
}


@pytest.mark.parametrize("row", REFUSED)
def test_what_is_refused_when_made(row: str, model: Any) -> None:
    options, message = REFUSED[row]
    with pytest.raises(ValueError, match=message):
        KVCache(model.config, **options)


def test_what_is_refused_when_filled(model: Any) -> None:
    cache, k = KVCache(model.config), torch.randn(1, 2, 3, 16)
    with pytest.raises(ValueError, match="keys have 16 features and values 8"):
        cache.update(k, k[..., :8], 0)
    with pytest.raises(ValueError, match="layers of mamba are linear_attention"):
        KVCache(decoder("mamba").config)


def test_a_cache_of_fixed_length_ends(model: Any) -> None:
    """At the next multiple of 16; before anything is written."""
    cache = KVCache(model.config, 20)
    filled(model, cache, ids(1, 32))
    with pytest.raises(Exception, match="32"):
        filled(model, cache, ids(1, 1))
    cache.reset()
    assert torch.equal(
        filled(model, cache, ids(1, 9)), filled(model, KVCache(model.config, 20), ids(1, 9))
    )


def test_compiled_once_for_all_tokens() -> None:
    """And attention reads the codes."""
    model = decoder("llama")
    compiled = torch.compile(model.forward, backend="qfx", options={"inner": "aot_eager"})
    caches = [KVCache(model.config, 48) for _ in range(2)]
    for cache in caches:
        filled(model, cache, ids(1, 6))
    counters.clear()
    for i in range(20):
        y = filled(compiled, caches[0], ids(1, 1, i))
        expected = filled(model, caches[1], ids(1, 1, i))
        assert (y - expected).abs().max() <= expected.abs().max() / 127
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    report = str(qfx.explain(model, input_ids=ids(1, 1), past_key_values=caches[0]))
    assert report.count("an attention over int8 keys and values") == 2


def test_a_compiled_model_takes_it() -> None:
    model = qfx.compile_for_generate(decoder("llama"), max_length=48)
    how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    text = model.generate(ids(1, 9), **how)
    for length in LENGTHS:
        cache = KVCache(model.config, length)
        assert torch.equal(model.generate(ids(1, 9), past_key_values=cache, **how), text)
    with by_modules(model):
        cache = KVCache(model.config)
        assert torch.equal(model.generate(ids(1, 9), past_key_values=cache, **how), text)
