"""The language models of benchmarks/decode.py and their texts: SmolLM2, and random weights of the
shapes of Qwen3-0.6B and Gemma-3-1B.

Random weights are drawn once, from a seed, into the cache folder. Their vocabulary, tokenizer and
texts are those of SmolLM2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import smollm
from benchmarks.converted import made
from examples.minilm import cache_folder

COMMON = {
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}


def _sizes(*sizes: int) -> dict[str, Any]:
    names = ["hidden_size", "intermediate_size", "num_hidden_layers"]
    names += ["num_attention_heads", "num_key_value_heads", "head_dim"]
    return dict(zip(names, sizes, strict=True))


ROPE = {"rope_type": "default", "rope_theta": 1e6}
WINDOW = {"query_pre_attn_scalar": 256, "sliding_window": 512}
SIZES: dict[str, dict[str, Any]] = {
    "qwen3": {**_sizes(1024, 3072, 28, 16, 8, 128), "rope_parameters": ROPE},
    "gemma3_text": {**_sizes(1152, 6912, 18, 4, 1, 256), **WINDOW},  # 18 of 26 layers
}


def drawn(kind: str, **sizes: Any) -> Any:
    """Returns a float32 model of random weights. Linears about preserve the mean square of their
    inputs; all branches together add as much to the residual stream as the embedding, so that the
    error of one is not amplified by the next."""
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {**COMMON, **SIZES[kind], **sizes}
    width, layers = given["hidden_size"], given["num_hidden_layers"]
    config = AutoConfig.for_model(kind, **given, initializer_range=width**-0.5)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_((2 * layers * width) ** -0.5)
    return model


def _kept(kind: str) -> Path:
    """Returns the folder of the drawn model, with the tokenizer of SmolLM2."""

    def write(folder: Path) -> None:
        from transformers import AutoTokenizer

        drawn(kind).save_pretrained(folder)
        AutoTokenizer.from_pretrained(smollm.converted()).save_pretrained(folder)

    known = hashlib.sha256(repr((COMMON, SIZES[kind])).encode()).hexdigest()[:8]
    return made(cache_folder() / "drawn" / f"{kind}-{known}", write)


MODELS: dict[str, Callable[[], Path]] = {
    "smollm2": smollm.converted,
    "qwen3": partial(_kept, "qwen3"),
    "gemma3": partial(_kept, "gemma3_text"),
}


def text(folder: Path, batch: int, length: int) -> Tensor:
    """Returns tokens [batch, length] of news, repeated if there are not enough."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    stream = [t for line in smollm.news_texts() for t in tokenizer(line).input_ids]
    stream *= -(-batch * length // len(stream))
    return torch.tensor(stream[: batch * length]).reshape(batch, length)
