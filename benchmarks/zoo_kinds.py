"""What architectures of a kind share: the sizes of their configurations, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

VOCABULARY, BATCH, TOKENS, WIDTH = 256, 2, 16, 64
Inputs = dict[str, Any]
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**TEXT, "num_key_value_heads": 2}
EXPERTS = {**GROUPED, "num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 32}
TWO_STACKS = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 128 for side in ("encoder", "decoder")},
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
IMAGE = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": WIDTH,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
AUDIO = {
    **TEXT,
    "conv_dim": [32, 32],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 8],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}
SIZES: dict[str, dict[str, Any]] = {
    "encoder": TEXT,
    "decoder": GROUPED,
    "encoder-decoder": TWO_STACKS,
    "mixture of experts": EXPERTS,
    "recurrent": TEXT,
    "vision": IMAGE,
    "audio": AUDIO,
    "other": {},
}


def text() -> Inputs:
    return {"input_ids": torch.randint(3, VOCABULARY, (BATCH, TOKENS))}


def two_texts() -> Inputs:
    return {**text(), "decoder_input_ids": torch.randint(3, VOCABULARY, (BATCH, TOKENS))}


def image() -> Inputs:
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32)}


def large_image() -> Inputs:
    return {"pixel_values": torch.randn(BATCH, 3, 64, 64)}


def image_and_text() -> Inputs:
    return {**image(), **text()}


def waveform() -> Inputs:
    return {"input_values": torch.randn(BATCH, 2000)}


def mel_and_text() -> Inputs:
    ids = torch.randint(3, VOCABULARY, (BATCH, TOKENS))
    return {"input_features": torch.randn(BATCH, 16, 64), "decoder_input_ids": ids}


def spectrogram() -> Inputs:
    return {"input_values": torch.randn(BATCH, 64, 32)}


def latent_text() -> Inputs:
    return {"inputs": torch.randn(BATCH, TOKENS, 32)}


def series() -> Inputs:
    return {"past_values": torch.randn(BATCH, 32, 3)}


def forecast() -> Inputs:
    past, future = (BATCH, 19), (BATCH, 8)
    return {
        "past_values": torch.rand(past),
        "past_time_features": torch.randn(*past, 2),
        "past_observed_mask": torch.ones(past),
        "future_values": torch.rand(future),
        "future_time_features": torch.randn(*future, 2),
    }


INPUTS: dict[str, Callable[[], Inputs]] = {
    "encoder": text,
    "decoder": text,
    "encoder-decoder": two_texts,
    "mixture of experts": text,
    "recurrent": text,
    "vision": image,
    "audio": waveform,
}
