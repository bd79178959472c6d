"""Definitions that architectures of a kind share: the sizes of their configurations, and inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

VOCABULARY, WIDTH = 256, 64
Inputs = dict[str, Any]


class Lengths(NamedTuple):
    """The sizes that differ between calls of a model. `side`: of images, if the model takes any."""

    batch: int
    tokens: int
    side: int


FIRST, SECOND = Lengths(2, 16, 32), Lengths(3, 21, 48)
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


def text(size: Lengths) -> Inputs:
    return {"input_ids": _ids(size)}


def _ids(size: Lengths) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (size.batch, size.tokens))


def two_texts(size: Lengths) -> Inputs:
    return {**text(size), "decoder_input_ids": _ids(size)}


def image(size: Lengths) -> Inputs:
    return {"pixel_values": torch.randn(size.batch, 3, 32, 32)}


def any_image(size: Lengths) -> Inputs:
    return {"pixel_values": torch.randn(size.batch, 3, size.side, size.side)}


def large_image(size: Lengths) -> Inputs:
    return any_image(size._replace(side=2 * size.side))


def image_and_text(size: Lengths) -> Inputs:
    return {**image(size), **text(size)}


def waveform(size: Lengths) -> Inputs:
    return {"input_values": torch.randn(size.batch, 125 * size.tokens)}


def mel_and_text(size: Lengths) -> Inputs:
    return {"input_features": torch.randn(size.batch, 16, 64), "decoder_input_ids": _ids(size)}


def spectrogram(size: Lengths) -> Inputs:
    return {"input_values": torch.randn(size.batch, 64, 32)}


def latent_text(size: Lengths) -> Inputs:
    return {"inputs": torch.randn(size.batch, size.tokens, 32)}


def series(size: Lengths) -> Inputs:
    return {"past_values": torch.randn(size.batch, 32, 3)}


def forecast(size: Lengths) -> Inputs:
    past, future = (size.batch, 19), (size.batch, 8)
    return {
        "past_values": torch.rand(past),
        "past_time_features": torch.randn(*past, 2),
        "past_observed_mask": torch.ones(past),
        "future_values": torch.rand(future),
        "future_time_features": torch.randn(*future, 2),
    }


INPUTS: dict[str, Callable[[Lengths], Inputs]] = {
    "encoder": text,
    "decoder": text,
    "encoder-decoder": two_texts,
    "mixture of experts": text,
    "recurrent": text,
    "vision": image,
    "audio": waveform,
}
