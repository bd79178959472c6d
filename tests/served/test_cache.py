"""An int8 or int4 cache of vLLM: what transformers computes with the same codes of keys and values,
for texts of any length, alone or in a batch, in pages that are used again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, Gemma2Config
from vllm import LLM

from qfx.ops.kv_cache import kv_empty
from tests.served import models
from tests.served.models import SIZES, engine, in_vllm, prompts

OPS = torch.ops.qfx
PROMPTS = 4
GEMMA = Gemma2Config(
    **SIZES,
    intermediate_size=256,
    num_key_value_heads=2,
    head_dim=32,
    query_pre_attn_scalar=32,
    sliding_window=9,
    attn_logit_softcapping=5.0,
)


def _through_codes(bits: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, d = k.shape
    cache = kv_empty(batch, heads, tokens, d, bits, bits)
    OPS.kv_write(*cache, k, v, torch.arange(tokens))
    read = (OPS.kv_keys, cache[:2]), (OPS.kv_values, cache[2:])
    keys, values = (f(*part, tokens, torch.float32) for f, part in read)
    return keys, values


def _attention(bits: int) -> Any:
    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **how: Any) -> Any:
        group = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(group, 1) for t in _through_codes(bits, k, v))
        behind = (torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2]))[None, None]
        seen = behind >= 0
        if how.get("sliding_window"):
            seen &= behind < how["sliding_window"]
        scores = q @ k.mT * how["scaling"]
        if cap := how.get("softcap"):
            scores = (scores / cap).tanh() * cap
        return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(1, 2), None

    return attend


@torch.no_grad()
def _in_transformers(folder: Path, bits: int | None) -> Tensor:
    name = "eager" if bits is None else f"coded{bits}"
    if bits is not None:
        AttentionInterface.register(name, _attention(bits))
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=name
    )
    return model.eval()(prompts(PROMPTS)).logits[:, :-1].log_softmax(-1)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", ["LLAMA", "GEMMA"])
def test_log_probabilities_are_those_of_the_same_codes(
    tmp_path: Path, kind: str, bits: int
) -> None:
    """Sums in another order move a key to the next code now and then."""
    config = GEMMA if kind == "GEMMA" else models.LLAMA
    folder = models.written(config, tmp_path)
    exact, wanted = (_in_transformers(folder, n) for n in (None, bits))
    cache = f"int{bits}_per_token_head"
    with engine(folder, quantization=None, kv_cache_dtype=cache) as llm:
        found = in_vllm(llm, PROMPTS)
    away, coded = ((t - wanted).square().mean().sqrt() for t in (found, exact))
    assert away < coded / 10, (away, coded)


@pytest.fixture(scope="module")
def served(llama: Path) -> Iterator[LLM]:
    """vLLM with int8 linears and an int8 cache, in its compiled mode."""
    with engine(llama, eager=False, kv_cache_dtype="int8_per_token_head") as llm:
        yield llm


def _words(llm: LLM, texts: list[list[int]], tokens: int) -> list[list[int]]:
    from vllm import SamplingParams

    given = [{"prompt_token_ids": text} for text in texts]
    how = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    found = llm.generate(given, how, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in found]


def test_a_text_alone_and_in_a_batch(served: LLM) -> None:
    """The attention of a text has the same bits in any batch; twice as many texts as run at once,
    of all lengths, so that pages are used again."""
    tokens = prompts(1)[0].tolist()
    texts = [tokens[: 1 + i] for i in range(len(tokens))]
    together = _words(served, texts, 8)
    alone = list(itertools.chain.from_iterable(_words(served, [text], 8) for text in texts))
    same = sum(a == b for a, b in zip(together, alone, strict=True))
    assert same >= 0.9 * len(texts), same


def test_a_shared_prefix_is_read_from_the_cache(llama: Path) -> None:
    answers_of = []
    for caching in (False, True):
        options = {"enable_prefix_caching": caching, "block_size": 32}
        with engine(llama, kv_cache_dtype="int8_per_token_head", **options) as llm:
            text = [*prompts(1)[0].tolist(), 1, 2, 3]
            answers_of.append([_words(llm, [text], 8), _words(llm, [[*text, 4]], 8)])
    assert answers_of[0] == answers_of[1]


def test_caches_of_other_dtypes_are_served_as_before(llama: Path) -> None:
    """By vLLM's own attention, in float32."""
    with engine(llama, quantization=None) as llm:
        found = in_vllm(llm, PROMPTS)
    assert (found - _in_transformers(llama, None)).abs().max() < 1e-3
