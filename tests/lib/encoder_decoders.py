"""Small encoder-decoders of transformers with random weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache

from qfx.hf.cross_kv_layer import CrossKVLayer
from qfx.hf.kv_layer import KVLayer

SOURCE, FRAMES = 11, 96  # tokens of a source sequence, frames of a source of sound
TOKENS: dict[str, Any] = {
    "vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
APART = {"tie_word_embeddings": False}
BART = TOKENS | APART | {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
    "max_position_embeddings": 64,
}  # fmt: skip
T5 = TOKENS | {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
SOUND = BART | {
    "max_source_positions": FRAMES // 2, "max_target_positions": 64, "num_mel_bins": 16,
    "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
SPEECH = SOUND | {
    "input_feat_per_channel": 16, "conv_channels": 32, "num_conv_layers": 1,
    "conv_kernel_sizes": (3,),
}  # fmt: skip
ENCODER_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", T5),
    "t5 v1.1": ("T5", T5 | {"feed_forward_proj": "gated-gelu"} | APART),
    "mt5": ("MT5", T5 | APART),
    "umt5": ("UMT5", T5 | APART),
    "bart": ("Bart", BART),
    "mbart": ("MBart", BART),
    "pegasus": ("Pegasus", BART),
    "marian": ("Marian", BART),
    "m2m100": ("M2M100", BART),
    "blenderbot": ("Blenderbot", BART),
    "whisper": ("Whisper", SOUND),
    "speech2text": ("Speech2Text", SPEECH),
}


def encoder_decoder(name: str, seed: int = 0, **others: Any) -> Any:
    """Returns a model in eval mode that generates until the requested length. Its weights preserve
    the size of their inputs, so that generated sequences do not repeat one token."""
    kind, sizes = ENCODER_DECODERS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, kind + "Config")(**sizes | others)
    model: Any = getattr(transformers, kind + "ForConditionalGeneration", None)
    model = (model or getattr(transformers, kind + "MTModel"))(config).float().eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0, weight[0].numel() ** -0.5)
            if path.endswith(".q.weight"):  # T5 does not divide scores
                weight.mul_(config.d_kv**-0.5)
    model.generation_config.update(
        pad_token_id=0, bos_token_id=1, eos_token_id=None, forced_eos_token_id=None
    )
    return model


def source(
    model: Any, texts: int, lengths: tuple[int, ...] = (), seed: int = 0
) -> dict[str, Tensor]:
    """Returns the input of the encoder, with an attention_mask if sequences have `lengths` of their
    own."""
    drawn = torch.Generator().manual_seed(seed)
    kind = model.config.model_type
    if kind == "whisper":
        return {"input_features": torch.randn(texts, 16, FRAMES, generator=drawn)}
    if kind == "speech_to_text":
        found = {"input_features": torch.randn(texts, FRAMES, 16, generator=drawn)}
        count = FRAMES
    else:
        found = {"input_ids": torch.randint(3, 96, (texts, SOURCE), generator=drawn)}
        count = SOURCE
    mask = torch.ones(texts, count, dtype=torch.int64)
    for row, length in zip(mask, lengths, strict=False):
        row[length:] = 0
    if "input_ids" in found:
        found["input_ids"] = found["input_ids"] * mask
    return found | {"attention_mask": mask}


def int8_cache(layers: int, bits: tuple[int, int] = (8, 8)) -> EncoderDecoderCache:
    """Returns a cache with the codes that programs read, for use by modules."""
    own = Cache(layers=[KVLayer(None, *bits) for _ in range(layers)])  # type: ignore[arg-type]
    cross = Cache(layers=[CrossKVLayer(None, *bits) for _ in range(layers)])  # type: ignore[arg-type]
    return EncoderDecoderCache(own, cross)
