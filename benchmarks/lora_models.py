"""The models of `benchmarks/lora.py`, as folders that transformers loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import smollm
from benchmarks.converted import made
from examples.minilm import cache_folder

TRAINED = "SmolLM2-135M"


def _qwen3() -> Path:
    """Returns the folder of a model of random weights with the sizes of Qwen3-0.6B."""
    return made(cache_folder() / "peers" / "qwen3-0.6b-random", _write_qwen3)


def _write_qwen3(folder: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)


FOLDERS: dict[str, Callable[[], Path]] = {
    TRAINED: smollm.converted,
    "shape of Qwen3-0.6B": _qwen3,
}
