"""Small models of transformers with experts, their blocks, and what goes to these."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import qfx
from qfx.nn.experts_like import is_experts

T, H, J, E = 24, 64, 96, 4  # tokens, features, features between the products, experts
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": H, "intermediate_size": J, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64,
    "num_experts_per_tok": 2, "experts_implementation": "eager", "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
LATENT = {
    "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "n_routed_experts": E, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": J, "first_k_dense_replace": 1,
}  # fmt: skip
HYBRID = {
    "num_experts": E, "expert_layer_period": 1, "expert_layer_offset": 0, "attn_layer_period": 2,
    "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 8,
}  # fmt: skip
NEXT = {
    "num_experts": E, "moe_intermediate_size": J, "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 4, "head_dim": 16, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
# The class without its ending, its settings, and the largest share of multiply-adds by weights
# that are int8 if the experts are not.
MODELS: dict[str, tuple[str, dict[str, Any], float]] = {
    "mixtral": ("Mixtral", {"num_local_experts": E}, 0.4),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": E, "moe_intermediate_size": J, "head_dim": 16}, 0.4),
    "olmoe": ("Olmoe", {"num_experts": E}, 0.4),
    "gpt-oss": ("GptOss", {"num_local_experts": E, "head_dim": 16}, 0.4),
    "deepseek-v3": ("DeepseekV3", LATENT, 0.8),
    "granite": ("GraniteMoe", {"num_local_experts": E}, 0.4),
    "jamba": ("Jamba", HYBRID, 0.5),
    "qwen3-next": ("Qwen3Next", NEXT, 0.8),
}
BY_MODEL = pytest.mark.parametrize("name", MODELS)
SCHEMES = ["w8a8", "w8a8-symmetric", "w8a8-groups", "w7a7", "w5a8", "w4a8"]
IDS = torch.randint(2, 96, (2, 12), generator=torch.Generator().manual_seed(0))


def model_of(name: str) -> Any:
    kind, settings, _ = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | settings)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def block_of(name: str) -> Any:
    """Returns the last block of float experts, with weights and biases of usual sizes."""
    block = [m for m in model_of(name).modules() if is_experts(m)][-1]
    g = torch.Generator().manual_seed(1)
    for each in block.parameters():
        each.data = torch.randn(each.shape, generator=g) * (0.1 if each.ndim == 3 else 0.5)
    return block


def routed(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Returns tokens, the experts of their two slots, and their weights."""
    g = torch.Generator().manual_seed(2)
    x, weights = torch.randn(T, H, generator=g), torch.rand(T, 2, generator=g)
    order = torch.rand(T, E, generator=g).argsort(1)
    return x.to(dtype), order[:, :2], weights.to(dtype)


def linears_of(stack: Tensor, bias: Any, scheme: Any) -> list[qfx.nn.Linear]:
    """Returns a qfx.nn.Linear for each weight of a stack [E, N, K]."""
    made = []
    for e, weight in enumerate(stack):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        linear.weight = nn.Parameter(weight.clone())
        if bias is not None:
            linear.bias = nn.Parameter(bias[e].detach())
        made.append(qfx.nn.Linear.from_float(linear, scheme))
    return made
