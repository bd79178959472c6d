"""Architectures of `transformers`, each as small as possible without losing its structure, with
random weights.

A row has a name, kind, model class, the differences of its configuration from the kind's `SIZES`,
and its inputs if they differ.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from benchmarks.zoo_kinds import (
    EXPERTS,
    FIRST,
    IMAGE,
    INPUTS,
    SIZES,
    TEXT,
    TWO_STACKS,
    WIDTH,
    Inputs,
    Lengths,
    any_image,
    forecast,
    image_and_text,
    large_image,
    latent_text,
    mel_and_text,
    series,
    spectrogram,
)

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched: configurations are made here


@dataclass(frozen=True)
class Architecture:
    """One architecture. `differs`: configuration in addition to the kind's `SIZES`, less `without`;
    `inputs`: only if they differ from the kind's."""

    name: str
    kind: str
    model: str
    differs: dict[str, Any] = field(default_factory=dict)
    inputs: Callable[[Lengths], Inputs] | None = None
    without: tuple[str, ...] = ()


ENCODER, DECODER, BOTH, EXPERT, RECURRENT, VISION, SOUND, OTHER = SIZES
ROWS = (
    Architecture("bert", ENCODER, "BertModel"),
    Architecture("roberta", ENCODER, "RobertaModel"),
    Architecture("albert", ENCODER, "AlbertModel", {"embedding_size": 32}),
    Architecture("electra", ENCODER, "ElectraModel", {"embedding_size": 32}),
    Architecture("distilbert", ENCODER, "DistilBertModel", {"hidden_dim": 128}),
    Architecture(
        "deberta-v2",
        ENCODER,
        "DebertaV2Model",
        {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    ),
    Architecture("mpnet", ENCODER, "MPNetModel"),
    Architecture("modernbert", ENCODER, "ModernBertModel", {"cls_token_id": 1, "sep_token_id": 2}),
    Architecture("squeezebert", ENCODER, "SqueezeBertForMaskedLM", {"embedding_size": 64}),
    Architecture(
        "xlnet",
        ENCODER,
        "XLNetModel",
        {"d_inner": 128, "d_head": 16},
        without=("max_position_embeddings",),
    ),
    Architecture("longformer", ENCODER, "LongformerModel", {"attention_window": 8}),
    Architecture("fnet", ENCODER, "FNetModel"),
    Architecture("nomic-bert", ENCODER, "NomicBertModel"),
    Architecture("gpt2", DECODER, "GPT2LMHeadModel"),
    Architecture(
        "gpt-neo",
        DECODER,
        "GPTNeoForCausalLM",
        {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    ),
    Architecture("gptj", DECODER, "GPTJForCausalLM", {"rotary_dim": 8}),
    Architecture("gpt-neox", DECODER, "GPTNeoXForCausalLM"),
    Architecture("opt", DECODER, "OPTForCausalLM", {"ffn_dim": 128, "word_embed_proj_dim": 32}),
    Architecture("bloom", DECODER, "BloomForCausalLM"),
    Architecture("falcon", DECODER, "FalconForCausalLM"),
    Architecture("llama", DECODER, "LlamaForCausalLM"),
    Architecture("mistral", DECODER, "MistralForCausalLM"),
    Architecture("qwen2", DECODER, "Qwen2ForCausalLM"),
    Architecture("qwen3", DECODER, "Qwen3ForCausalLM", {"head_dim": 16}),
    Architecture("gemma2", DECODER, "Gemma2ForCausalLM", {"head_dim": 16}),
    Architecture("gemma3", DECODER, "Gemma3ForCausalLM", {"head_dim": 16}),
    Architecture("phi", DECODER, "PhiForCausalLM"),
    Architecture("phi3", DECODER, "Phi3ForCausalLM"),
    Architecture("olmo2", DECODER, "Olmo2ForCausalLM"),
    Architecture("stablelm", DECODER, "StableLmForCausalLM"),
    Architecture("smollm3", DECODER, "SmolLM3ForCausalLM"),
    Architecture(
        "t5",
        BOTH,
        "T5ForConditionalGeneration",
        {"d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
    ),
    Architecture("bart", BOTH, "BartForConditionalGeneration"),
    Architecture("pegasus", BOTH, "PegasusForConditionalGeneration"),
    Architecture("marian", BOTH, "MarianMTModel"),
    Architecture("mixtral", EXPERT, "MixtralForCausalLM", {"num_local_experts": 4}),
    Architecture(
        "qwen2-moe", EXPERT, "Qwen2MoeForCausalLM", {"shared_expert_intermediate_size": 64}
    ),
    Architecture("olmoe", EXPERT, "OlmoeForCausalLM"),
    Architecture(
        "deepseek-v3",
        EXPERT,
        "DeepseekV3ForCausalLM",
        {
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
        },
    ),
    Architecture("gpt-oss", EXPERT, "GptOssForCausalLM", {"num_local_experts": 4, "head_dim": 16}),
    Architecture(
        "switch",
        BOTH,
        "SwitchTransformersForConditionalGeneration",
        {
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": 2,
            "num_heads": 4,
            "num_experts": 4,
            "num_decoder_layers": 2,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "router_jitter_noise": 0.0,
        },
    ),
    Architecture("mamba", RECURRENT, "MambaForCausalLM", {"state_size": 8}),
    Architecture(
        "mamba2",
        RECURRENT,
        "Mamba2ForCausalLM",
        {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
    ),
    Architecture(
        "rwkv", RECURRENT, "RwkvForCausalLM", {"context_length": 64, "attention_hidden_size": 64}
    ),
    Architecture(
        "recurrent-gemma",
        RECURRENT,
        "RecurrentGemmaForCausalLM",
        {
            "num_hidden_layers": 3,
            "lru_width": 64,
            "attention_window_size": 16,
            "num_key_value_heads": 2,
            "head_dim": 16,
        },
    ),
    Architecture(
        "qwen3-next",
        RECURRENT,
        "Qwen3NextForCausalLM",
        {
            **EXPERTS,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "shared_expert_intermediate_size": 32,
        },
    ),
    Architecture("vit", VISION, "ViTModel"),
    Architecture("deit", VISION, "DeiTModel"),
    Architecture("beit", VISION, "BeitModel"),
    Architecture("dinov2", VISION, "Dinov2Model"),
    Architecture(
        "swin",
        VISION,
        "SwinModel",
        {"patch_size": 4, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
        any_image,
        without=("num_attention_heads",),
    ),
    Architecture(
        "convnext",
        VISION,
        "ConvNextModel",
        {"patch_size": 4, "hidden_sizes": [32, 64], "depths": [1, 1], "num_stages": 2},
        any_image,
    ),
    Architecture(
        "segformer",
        VISION,
        "SegformerForSemanticSegmentation",
        {
            "hidden_sizes": [16, 32, 48, 64],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 3, 4],
            "decoder_hidden_size": 64,
        },
        large_image,
    ),
    Architecture("siglip-vision", VISION, "SiglipVisionModel"),
    Architecture(
        "clip",
        VISION,
        "CLIPModel",
        {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 32},
        image_and_text,
    ),
    Architecture("wav2vec2", SOUND, "Wav2Vec2Model"),
    Architecture("hubert", SOUND, "HubertModel"),
    Architecture("wavlm", SOUND, "WavLMModel"),
    Architecture(
        "whisper",
        SOUND,
        "WhisperForConditionalGeneration",
        {**TWO_STACKS, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 64},
        mel_and_text,
    ),
    Architecture(
        "ast",
        SOUND,
        "ASTModel",
        {
            "patch_size": 8,
            "frequency_stride": 8,
            "time_stride": 8,
            "max_length": 64,
            "num_mel_bins": 32,
        },
        spectrogram,
    ),
    Architecture(
        "perceiver",
        OTHER,
        "PerceiverModel",
        {
            "num_latents": 16,
            "d_latents": 64,
            "d_model": 32,
            "num_self_attends_per_block": 2,
            "num_self_attention_heads": 4,
            "num_cross_attention_heads": 4,
        },
        latent_text,
    ),
    Architecture(
        "time-series-transformer",
        OTHER,
        "TimeSeriesTransformerModel",
        {
            "d_model": WIDTH,
            "prediction_length": 8,
            "context_length": 12,
            "num_time_features": 2,
            "lags_sequence": [1, 2, 3, 4, 5, 6, 7],
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
        },
        forecast,
    ),
    Architecture(
        "patchtst",
        OTHER,
        "PatchTSTModel",
        {
            "num_input_channels": 3,
            "context_length": 32,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": WIDTH,
            "num_hidden_layers": 2,
            "ffn_dim": 128,
        },
        series,
    ),
)
TABLE = {row.name: row for row in ROWS}


def build(row: Architecture, size: Lengths = FIRST) -> tuple[nn.Module, Inputs]:
    """Returns the model in eval mode, with nothing random from call to call, and inputs of that
    size."""
    import transformers

    torch.manual_seed(0)
    model_class = getattr(transformers, row.model)
    sizes = {k: v for k, v in SIZES[row.kind].items() if k not in row.without}
    config = model_class.config_class(**{**sizes, **row.differs})
    _adjust(config)
    model = model_class(config).eval()
    return model, (row.inputs or INPUTS[row.kind])(size)


def _adjust(config: Any) -> None:
    """Turns off all dropout and masking of the input, and makes weights as large as at full size.

    The usual deviation of 0.02 is meant for rows of some thousand features. With rows of 64,
    linears would add almost nothing to the residual stream, and their errors would go unnoticed.
    """
    for name, value in list(vars(config).items()):
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        elif name in ("initializer_range", "init_std"):
            setattr(config, name, WIDTH**-0.5)
        elif "layer_scale_init" in name:
            setattr(config, name, 1.0)
        elif hasattr(value, "sub_configs"):
            _adjust(value)
    if hasattr(config, "apply_spec_augment"):
        config.apply_spec_augment = False
