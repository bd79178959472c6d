"""The language models of benchmarks/decode.py: SmolLM2, and others of random weights.

A model with random weights has the shapes of a widely used one, but the vocabulary of SmolLM2,
whose texts and tokenizer it uses. It is drawn once, from a seed, into the cache folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import smollm
from benchmarks.converted import made
from examples.minilm import cache_folder

SEED, NORMS = 0, 0.1  # NORMS: how far the weights of norms are from one
# What a branch ends with, and what a norm adds to its weight.
LAST = {
    "qwen3": ("o_proj.weight", "down_proj.weight"),
    "gemma3_text": ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight"),
}
ADDED = {"qwen3": 0.0, "gemma3_text": 1.0}
COMMON = {
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
QWEN3 = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
GEMMA3 = {
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "max_position_embeddings": 32768,
}


def qwen3(**sizes: Any) -> Any:
    """Returns the configuration of Qwen3-0.6B: 491 million parameters with this vocabulary."""
    from transformers import Qwen3Config

    return Qwen3Config(**_scaled({**COMMON, **QWEN3, **sizes}))


def gemma3(**sizes: Any) -> Any:
    """Returns the configuration of Gemma-3-1B with 18 of its 26 layers: 540 million parameters with
    this vocabulary."""
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(**_scaled({**COMMON, **GEMMA3, **sizes}))


def _scaled(sizes: dict[str, Any]) -> dict[str, Any]:
    """Returns the sizes with an initializer range that makes linears about preserve the mean square
    of their inputs."""
    return {**sizes, "initializer_range": sizes["hidden_size"] ** -0.5}


def drawn(config: Any) -> Any:
    """Returns a float32 model of random weights, including those of norms. All branches together
    add as much to the residual as the embedding contains, so that the error of one is not amplified
    by the next."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(SEED)
    kind = config.model_type
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        start = model.model.embed_tokens(torch.arange(config.vocab_size)).square().mean().sqrt()
        share = start * (2 * config.num_hidden_layers) ** -0.5
        for name, weight in model.named_parameters():
            added = ADDED[kind] if weight.ndim == 1 else 0.0
            if weight.ndim == 1:
                weight.copy_(1 + NORMS * torch.randn_like(weight) - added)
            if name.endswith(LAST[kind]):
                weight.add_(added).mul_(share).sub_(added)
    return model


def _kept(config: Any) -> Path:
    """Returns the folder of the drawn model, with the tokenizer of SmolLM2."""
    known = hashlib.sha256(f"{SEED} {NORMS} {config.to_json_string()}".encode()).hexdigest()

    def write(folder: Path) -> None:
        from transformers import AutoTokenizer

        drawn(config).save_pretrained(folder)
        AutoTokenizer.from_pretrained(smollm.converted()).save_pretrained(folder)

    return made(cache_folder() / "drawn" / f"{config.model_type}-{known[:8]}", write)


MODELS: dict[str, Callable[[], Path]] = {
    "smollm2": smollm.converted,
    "qwen3": lambda: _kept(qwen3()),
    "gemma3": lambda: _kept(gemma3()),
}


def text(folder: Path, batch: int, length: int) -> Tensor:
    """Returns tokens [batch, length] of news, repeated if there are not enough."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    stream = [t for line in smollm.news_texts() for t in tokenizer(line).input_ids]
    stream *= -(-batch * length // len(stream))
    return torch.tensor(stream[: batch * length]).reshape(batch, length)


def prompts(folder: Path, texts: int, length: int) -> Tensor:
    """Returns tokens [texts, length]: the beginnings of news texts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = (tokenizer(line).input_ids[:length] for line in smollm.news_texts())
    return torch.tensor([row for row in rows if len(row) == length][:texts])
