"""compile_for_generate on architectures: steps give the logits of the modules, or these serve and
say why."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import qfx
from qfx.hf import KVCache
from tests.generate.families import rows
from tests.lib.coded_attention import reading_codes
from tests.lib.decoders import SIZES, WINDOW, by_modules, decoder, ids
from tests.lib.pairs import usual

PROMPT = WINDOW + 5
STEPS = (1, 1, 1, 3, 1, 7, 1)  # tokens of each
# Decoders of which one program is a step.
SERVED = (
    "llama", "qwen2", "qwen3", "gemma3", "mistral", "phi3", "gpt2", "opt", "gpt-neox", "falcon",
    "falcon, alibi", "olmo2", "stablelm", "cohere", "gemma2", "mixtral", "glm4-moe", "bloom",
    "codegen", "gpt-j", "gpt-neo", "mpt", "xglm",
)  # fmt: skip
# The others are Llama with another norm or fused weights, or are served in files of their own.
USUAL = usual(
    ["qwen3", "phi3", "gpt2", "opt", "gpt-neox", "falcon, alibi", "cohere", "gemma2", "mixtral",
     "glm4-moe", "codegen", "mpt"],
    SERVED,
)  # fmt: skip
UNSERVED = {"gpt-oss": "its attention is 'eager'"}


def prompt(model: Any, cache: Any) -> Tensor:
    """Logits [PROMPT, V]."""
    with torch.no_grad():
        y: Tensor = model(input_ids=ids(1, PROMPT), past_key_values=cache, use_cache=True).logits[0]
    return y


def logits(model: Any, cache: Any, befores: list[Any] | None = None) -> Tensor:
    """Of the tokens behind a prompt, [tokens, V]. `cache`: one, or one for each step. `befores`
    gets the cache as it was before each step: a code that tips is not read by the next."""
    found = []
    for i, count in enumerate(STEPS):
        own = cache[i] if isinstance(cache, list) else cache
        if befores is not None:
            befores.append(copy.deepcopy(own))
        with torch.no_grad():
            step = model(input_ids=ids(1, count, i + 10), past_key_values=own, use_cache=True)
        found.append(step.logits[0])
    return torch.cat(found)


@pytest.mark.parametrize("name", USUAL)
def test_steps_give_what_the_modules_give(
    name: str, ran: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    """Sums of K=128 floats in another order differ by K eps of their size. Where that tips the
    rounding of an activation, its code differs by one of 127 steps, and later tokens of its step
    read that; behind the same cache it does not tip at most tokens."""
    with caplog.at_level(logging.INFO, "qfx.generate"):
        model = qfx.compile_for_generate(decoder(name), max_length=64)
    assert "PyTorch runs" not in caplog.text
    cache = transformers.DynamicCache(config=model.config)
    y = prompt(model, cache)
    ran.clear()
    befores: list[Any] = []
    z = logits(model, cache, befores)
    assert [count for _, count in ran] == [*STEPS]
    with by_modules(model):
        y_expected, expected = prompt(model, KVCache(model.config)), logits(model, befores)
    assert (y - y_expected).norm() <= y_expected.norm() / 127
    error = (z - expected).abs().amax(1) / expected.abs().amax(1)
    assert error.max() <= 2 / 127 and error.median() <= 128 * torch.finfo(torch.float32).eps
    ran.clear()
    text = model.generate(ids(1, PROMPT), max_new_tokens=12, do_sample=False)
    assert len(ran) == 11
    with by_modules(model):
        cache = KVCache(model.config)
        same = model.generate(
            ids(1, PROMPT), max_new_tokens=12, do_sample=False, past_key_values=cache
        )
    assert torch.equal(text, same)


@pytest.mark.parametrize("name", UNSERVED)
def test_modules_serve_what_programs_cannot(
    name: str, ran: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    """With the cache that they have without us; said once."""
    model = qfx.compile_for_generate(qfx.quantize_(decoder(name)), max_length=64)
    text = model.generate(ids(1, PROMPT), max_new_tokens=8, do_sample=False)
    model.generate(ids(2, PROMPT), max_new_tokens=2, do_sample=False)
    (said,) = [r.message for r in caplog.records if r.name.startswith("qfx.generate")]
    assert UNSERVED[name] in said and type(model).__name__ in said and "\n" not in said
    with by_modules(model):
        assert torch.equal(text, model.generate(ids(1, PROMPT), max_new_tokens=8, do_sample=False))
    assert ran == []


def test_outputs_that_a_configuration_asks_for(
    ran: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    """In every call: modules run. Asked for in one call, modules run that one."""
    asks = qfx.compile_for_generate(decoder("mixtral", output_router_logits=True), max_length=64)
    (said,) = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert "has output_router_logits=True, and programs return logits alone" in said
    model = qfx.compile_for_generate(decoder("mixtral"), max_length=64)
    for each, more in ((asks, {}), (model, {"output_router_logits": True})):
        found = each(ids(1, 9), past_key_values=transformers.DynamicCache(), **more).router_logits
        assert len(found) == len(model.model.layers) and ran == []
    model.generate(ids(1, 9), max_new_tokens=3, do_sample=False)
    assert len(ran) > 0


def test_a_model_that_asks_for_no_cache_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """As MPT's configurations do."""
    qfx.compile_for_generate(decoder("mpt", use_cache=False), max_length=64)
    (said,) = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert "MptForCausalLM keeps no cache" in said and "use_cache=True" in said


def t5() -> Any:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(vocab_size=96, **sizes)
    return transformers.T5ForConditionalGeneration(config).eval()


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "latent attention": (lambda: decoder("deepseek"), {}, "keys have 16 features and values 8"),
    "states": (lambda: decoder("mamba"), {}, "layers of mamba are linear_attention"),
    "chunks": (lambda: decoder("llama4"), {}, "chunk"),
    "no model": (lambda: nn.Linear(3, 3), {}, "Linear is no model of transformers that generates"),
    "training": (lambda: decoder("llama").train(), {}, r"call model.eval\(\) first"),
    "bits": (lambda: decoder("llama"), {"key_bits": 3}, "key_bits=3"),
    "room": (lambda: decoder("llama"), {"max_length": 0}, "max_length=0"),
    "half a token": (lambda: decoder("llama"), {"max_length": 9.5}, "max_length=9.5: expected"),
    "no source": (t5, {"max_source_length": 0}, "max_source_length=0: expected a number of tokens"),
    "batch": (lambda: decoder("llama"), {"batch_sizes": (8, 0)}, r"batch_sizes=\(8, 0\)"),
    "yes": (lambda: decoder("llama"), {"batch_sizes": (True,)}, r"batch_sizes=\(True,\)"),
    "one batch": (lambda: decoder("llama"), {"batch_sizes": 8}, r"batch_sizes=8: .* as \(1, 8\)"),
}


@pytest.mark.parametrize("row", REFUSED)
def test_what_is_refused_stays_as_it_is(row: str) -> None:
    make, options, message = REFUSED[row]
    model = make()
    with pytest.raises(ValueError, match=message):
        qfx.compile_for_generate(model, **options)
    assert "forward" not in vars(model)
    assert not any(isinstance(m, qfx.nn.Linear) for m in model.modules())


def test_frequencies_of_long_texts(ran: list[tuple[int, ...]]) -> None:
    """They are chosen in the graph, and written where the model keeps them: which is no reason to
    make a program again."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [20.0] * 8}
    scaled = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0} | factors
    model = decoder("phi3", num_hidden_layers=1, rope_parameters=scaled)
    model.config.rope_parameters["original_max_position_embeddings"] = PROMPT + 2
    qfx.compile_for_generate(model, max_length=64)
    ran.clear()
    caches = [transformers.DynamicCache() for _ in range(2)]
    for cache in caches:
        prompt(model, cache)
    caches.append(copy.deepcopy(caches[0]))
    y = logits(model, caches[0])
    made = dict(model.forward.runners)
    assert len(ran) == len(STEPS)
    assert torch.equal(logits(model, caches[1]), y)
    prompt(model, transformers.DynamicCache())
    assert model.forward.runners == made
    with by_modules(model):
        expected = logits(model, caches[2])
    assert (y - expected).abs().max() <= expected.abs().max() / 127


@pytest.mark.parametrize("grown", [False, True])
def test_frequencies_of_a_dynamic_length(grown: bool, ran: list[tuple[int, ...]]) -> None:
    """Programs serve texts up to the length from which frequencies change, also once the modules
    have read a longer one; modules go on behind it."""
    sizes = SIZES | {"max_position_embeddings": 20}
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, rope_parameters=scaled)
    model = transformers.LlamaForCausalLM(config).eval()
    reference = qfx.quantize_(copy.deepcopy(model))
    if grown:
        with torch.no_grad():
            model(ids(1, 40))
    qfx.compile_for_generate(model, max_length=64)
    ran.clear()
    with reading_codes():
        text = model.generate(ids(1, 8), max_new_tokens=30, do_sample=False)
    assert len(ran) == 20 - 8  # steps
    cache = KVCache(config)
    with reading_codes():
        expected = reference.generate(
            ids(1, 8), max_new_tokens=30, do_sample=False, past_key_values=cache
        )
    assert torch.equal(text, expected)


def test_a_model_that_writes_no_cache_is_refused_before_it_is_changed() -> None:
    sizes = {"vocab_size": 96, "n_layer": 1, "n_head": 2}
    made = [
        transformers.OpenAIGPTLMHeadModel(transformers.OpenAIGPTConfig(n_embd=32, **sizes)),
        transformers.XLNetLMHeadModel(transformers.XLNetConfig(d_model=32, d_inner=32, **sizes)),
        transformers.RwkvForCausalLM(
            transformers.RwkvConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2)
        ),
    ]
    for model in made:
        before = [*model.modules()]
        with pytest.raises(ValueError, match=f"{type(model).__name__} writes no keys and values"):
            qfx.compile_for_generate(model.eval())
        assert [*model.modules()] == before and "forward" not in vars(model)


class _WithoutPositions(transformers.LlamaForCausalLM):
    """A model of a user's, whose forward takes no position_ids."""

    def forward(  # type: ignore[override]
        self, input_ids: Any = None, past_key_values: Any = None, use_cache: Any = None
    ) -> Any:
        return super().forward(input_ids, past_key_values=past_key_values, use_cache=use_cache)


def test_a_model_that_takes_no_positions_is_served_by_its_modules(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = _WithoutPositions(transformers.LlamaConfig(**SIZES)).eval()
    assert qfx.compile_for_generate(model, max_length=64) is model
    assert "generate, without programs: TypeError" in caplog.text
    with torch.no_grad():
        logits_ = model(ids(1, 5), past_key_values=transformers.DynamicCache(), use_cache=True)
    assert logits_.logits.shape[:2] == (1, 5)


def test_the_table_of_decoders_has_a_row_of_each_type() -> None:
    found = [row.split("|")[1:4] for row in rows(["gpt2", "mamba"])]
    assert [row[2].strip() for row in found[:3]] == ["programs"] * 3
    assert len(found) == 4 and "refused: layers of mamba" in found[3][2]
