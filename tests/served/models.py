"""Tiny language models with random weights, as checkpoints, and what transformers and vLLM compute
with them in float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    OlmoeConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

import qfx

WORDS, LENGTH = 512, 32
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.1,  # at 0.02 all words are about as probable
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA = LlamaConfig(**SIZES, intermediate_size=256, num_key_value_heads=2)
OLMOE = OlmoeConfig(**SIZES, intermediate_size=64, num_experts=8, num_experts_per_tok=2)
GPT_OSS = GptOssConfig(
    **SIZES,
    head_dim=32,
    num_key_value_heads=2,
    intermediate_size=128,
    num_local_experts=4,
    num_experts_per_tok=2,
)


def written(config: PretrainedConfig, folder: Path) -> Path:
    """Writes a model with random weights, and a tokenizer of the words w0, w1, ..."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(folder)
    return folder


def prompts(count: int) -> Tensor:
    """Returns random tokens [count, LENGTH]; those of more prompts begin with those of fewer."""
    generator = torch.Generator().manual_seed(1)
    return torch.stack([torch.randint(WORDS, (LENGTH,), generator=generator) for _ in range(count)])


@torch.no_grad()
def in_transformers(folder: Path, options: Mapping[str, Any] | None, count: int) -> Tensor:
    """Returns the log probabilities [count, LENGTH - 1, WORDS] of all words after each word of the
    prompts. `options`: those of `qfx.Config`, or None to leave the model float."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if options is not None:
        qfx.quantize_(model, qfx.Config(**options, smoothing=False))  # vLLM has none
    return model(prompts(count)).logits[:, :-1].log_softmax(-1)


@contextmanager
def engine(
    folder: Path,
    options: Mapping[str, Any] | None = None,
    eager: bool = True,
    quantization: str | None = "qfx",
    **more: Any,
) -> Iterator:
    """vLLM in this process, one engine at a time. `quantization`: None for what the checkpoint
    says. `more`: further arguments of `LLM`."""
    overrides = {"quantization_config": {"quant_method": "qfx", **options}} if options else {}
    llm = LLM(
        str(folder),
        quantization=quantization,
        hf_overrides=overrides,
        dtype="float32",
        enforce_eager=eager,
        max_model_len=2 * LENGTH,
        max_num_seqs=16,
        max_logprobs=WORDS,
        **more,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def answers(llm: LLM, count: int, tokens: int, adapter: Any = None, **sampling: Any) -> list[Any]:
    """Returns vLLM's most probable continuations of the prompts."""
    given = [{"prompt_token_ids": prompt} for prompt in prompts(count).tolist()]
    how = SamplingParams(temperature=0, max_tokens=tokens, **sampling)
    return llm.generate(given, how, use_tqdm=False, lora_request=adapter)


def in_vllm(llm: LLM, count: int) -> Tensor:
    """Returns what `in_transformers` does."""
    found = torch.full((count, LENGTH - 1, WORDS), torch.nan)
    for row, answer in zip(found, answers(llm, count, 1, prompt_logprobs=WORDS), strict=True):
        for after, words in zip(row, answer.prompt_logprobs[1:], strict=True):
            for word, entry in words.items():
                after[word] = entry.logprob
    return found
