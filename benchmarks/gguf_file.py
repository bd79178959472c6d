"""The weights of a language model of transformers as a GGUF file for llama.cpp, in Q8_0 or Q4_0.

Rows of Q8_0 are blocks of 32 codes with a scale of 16 bits; norms are float32. The embedding is
quantized too, because it is also the head. There is no vocabulary: llama.cpp receives tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.converted import converted
from benchmarks.peer import UnsupportedError

BLOCK = 32


@dataclass(frozen=True)
class Architecture:
    """An architecture. `name`: llama.cpp's name. `interleaved`: the two features of a rotary pair
    are adjacent, while in transformers they are half a head apart. `norm`: a number to add to the
    weights of norms in transformers."""

    name: str
    interleaved: bool = False
    norm: float = 0


ARCHITECTURES = {
    "llama": Architecture("llama", interleaved=True),
    "qwen3": Architecture("qwen3"),
    "gemma3_text": Architecture("gemma3", norm=1),
}
EVERY = 6  # of the layers of Gemma 3 sees all


def gguf_file(inner: Any, kind: str) -> Path:
    """Returns the GGUF file of a model without its head, which must be the embedding; made at the
    first call.

    Raises UnsupportedError if llama.cpp would run a different model.
    """
    check(inner.config)
    import gguf

    form = f"gguf-{kind.lower()}-{gguf.GGUF_VERSION}"
    return converted(form, inner, partial(_write, inner, kind))


def check(config: Any) -> None:
    """Raises UnsupportedError if `gguf_file` would."""
    if config.model_type not in ARCHITECTURES:
        known, kind = ", ".join(ARCHITECTURES), config.model_type
        raise UnsupportedError(f"GGUF files are written here for {known}, and this is {kind}.")
    if not config.tie_word_embeddings:
        raise UnsupportedError("GGUF files are written here for heads that are the embedding.")
    if config.hidden_size % BLOCK or config.intermediate_size % BLOCK:
        sizes = f"{config.hidden_size} and {config.intermediate_size}"
        raise UnsupportedError(f"Q8_0 has blocks of {BLOCK}, which do not divide {sizes}.")
    if config.model_type == "gemma3_text":
        _check_gemma3(config)


def _check_gemma3(config: Any) -> None:
    """Checks the constants that llama.cpp assumes and that the file does not contain."""
    known = {
        "turn in windows by": (config.rope_parameters["sliding_attention"]["rope_theta"], 10_000.0),
        "divide scores by the root of": (config.query_pre_attn_scalar, config.head_dim),
        "see all in the layers": (
            [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"],
            list(range(EVERY - 1, config.num_hidden_layers, EVERY)),
        ),
    }
    for what, (own, taken) in known.items():
        if own != taken:
            raise UnsupportedError(f"llama.cpp has Gemma 3 {what} {taken}, this model has {own}.")


def _write(inner: Any, kind: str, path: Path) -> None:
    import gguf

    config = inner.config
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config.model_type].name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    _add_tensors(writer, inner, gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensors(writer: Any, inner: Any, kind: Any) -> None:
    import gguf

    config = inner.config
    own = ARCHITECTURES[config.model_type]
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[own.name], config.num_hidden_layers)
    heads = {"q_proj.weight": config.num_attention_heads} if own.interleaved else {}
    heads |= {"k_proj.weight": config.num_key_value_heads} if own.interleaved else {}
    for name, weight in inner.named_parameters():
        known = names.get_name(f"model.{name}", try_suffixes=(".weight",))
        assert known is not None, name
        tensor = weight.detach()
        if tensor.ndim == 1:
            writer.add_tensor(known, (tensor + own.norm).numpy())
            continue
        for ending, count in heads.items():
            tensor = _interleaved(tensor, count) if name.endswith(ending) else tensor
        writer.add_tensor(known, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape).contiguous()
