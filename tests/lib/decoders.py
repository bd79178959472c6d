"""Small decoders of transformers with random weights, and how to run them without compiled
steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.lib.coded_attention import reading_codes

WINDOW = 8
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 256, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
OWN_NAMES = {
    "vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
}  # fmt: skip
# Routers that choose among groups of experts first.
IN_GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0}
# The class without its ending, and the settings of its configuration.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES | GROUPED),
    "qwen2": ("Qwen2", SIZES | GROUPED),
    "qwen3": ("Qwen3", SIZES | GROUPED | {"head_dim": 32}),
    "gemma2": ("Gemma2", SIZES | GROUPED | {"head_dim": 16, "sliding_window": WINDOW}),
    "gemma3": (
        "Gemma3",
        SIZES | GROUPED | {
            "head_dim": 16, "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "mistral": ("Mistral", SIZES | GROUPED | {"sliding_window": WINDOW}),
    "phi3": ("Phi3", SIZES | GROUPED),
    "gpt2": ("GPT2", OWN_NAMES),
    "opt": ("OPT", SIZES | {"ffn_dim": 128, "word_embed_proj_dim": 64}),
    "gpt-neox": ("GPTNeoX", SIZES),
    "falcon": ("Falcon", SIZES),
    "falcon, alibi": ("Falcon", SIZES | {"alibi": True}),
    "olmo2": ("Olmo2", SIZES | GROUPED),
    "stablelm": ("StableLm", SIZES | GROUPED),
    "cohere": ("Cohere", SIZES | GROUPED),
    "mixtral": ("Mixtral", SIZES | GROUPED | {"num_local_experts": 4, "sliding_window": WINDOW}),
    "glm4-moe": ("Glm4Moe", SIZES | GROUPED | EXPERTS | IN_GROUPS | {"head_dim": 16}),
    "bloom": ("Bloom", {"vocab_size": 96, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "codegen": ("CodeGen", OWN_NAMES | {"rotary_dim": 8}),
    "gpt-j": ("GPTJ", OWN_NAMES | {"rotary_dim": 8}),
    "gpt-neo": (
        "GPTNeo",
        SIZES | {
            "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
            "window_size": WINDOW,
        },
    ),
    "mpt": (
        "Mpt",
        {"vocab_size": 96, "d_model": 64, "n_heads": 4, "n_layers": 2, "use_cache": True},
    ),
    "xglm": (
        "XGLM",
        {"vocab_size": 96, "d_model": 64, "ffn_dim": 128, "num_layers": 2, "attention_heads": 4},
    ),
    "gpt-oss": ("GptOss", SIZES | GROUPED | {"num_local_experts": 4, "head_dim": 16}),
    "deepseek": ("DeepseekV3", SIZES | EXPERTS | LATENT),
    "mamba": ("Mamba", SIZES | {"state_size": 8}),
    "llama4": ("Llama4", SIZES | GROUPED | {"attention_chunk_size": 8}),
}  # fmt: skip


def decoder(name: str, **others: Any) -> Any:
    """Returns a model in eval mode that generates until the requested length."""
    kind, sizes = DECODERS[name]
    found = (
        getattr(transformers, kind + ending, None) for ending in ("ForCausalLM", "LMHeadModel")
    )
    text = getattr(transformers, kind + "TextConfig", None)
    config = (text or getattr(transformers, kind + "Config"))(**sizes | others)
    torch.manual_seed(0)
    model = next(filter(None, found))(config).float().eval()
    model.generation_config.update(pad_token_id=0, bos_token_id=1, eos_token_id=None)
    return model


def ids(batch: int, length: int, seed: int = 0) -> Tensor:
    """Returns tokens [batch, length], none of them padding."""
    return torch.randint(2, 96, (batch, length), generator=torch.Generator().manual_seed(seed))


@contextmanager
def by_modules(model: Any) -> Iterator[None]:
    """Runs the model's own modules inside the context, instead of what `compile_for_generate`
    installed. They attend to an int8 cache by the operator that programs use."""
    forward = model.__dict__.pop("forward")
    try:
        with reading_codes():
            yield
    finally:
        model.forward = forward
