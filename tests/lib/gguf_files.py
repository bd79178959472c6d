"""GGUF files, written by the package gguf."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

Kind = gguf.GGMLQuantizationType
K_BLOCK = 256


def blocks(values: Tensor, kind: Any) -> np.ndarray[Any, Any]:
    """Returns the bytes of a matrix in a quantization kind. gguf cannot quantize to Q4_K and
    similar kinds: their blocks are random, with finite scales."""
    if kind.name.endswith("_K"):
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        n, k = values.shape
        drawn = np.random.default_rng(0).integers(0, 60, (n, k // elements * size), dtype=np.uint8)
        return drawn
    return gguf.quants.quantize(values.numpy(), kind)


def write_gguf(
    path: Path,
    tensors: Mapping[str, tuple[Tensor, Any]],
    fields: Mapping[str, Any] | None = None,
    arch: str = "llama",
) -> dict[str, Tensor]:
    """Writes a file and returns the float32 values that gguf decodes for each tensor. `fields`:
    integers and lists of the header."""
    writer = gguf.GGUFWriter(path, arch)
    values = {}
    for name, value in (fields or {}).items():
        (writer.add_array if isinstance(value, list) else writer.add_uint32)(name, value)
    for name, (tensor, kind) in tensors.items():
        raw = blocks(tensor.float(), kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
        values[name] = torch.from_numpy(gguf.dequantize(raw, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def llama_gguf(
    path: Path,
    model: Any,
    kinds: list[Any],
    arch: str = "llama",
    interleaved: bool = True,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Writes a model of Llama's architecture with its matrices in alternating `kinds`, and returns
    its float32 values by the names of transformers. `more`: further fields of the header."""
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    by_name = {each: name for name, each in gguf.MODEL_ARCH_NAMES.items()}
    known = gguf.get_tensor_name_map(by_name[arch], config.num_hidden_layers)
    tensors, names, turns = {}, {}, 0
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        there = known.get_name(name, try_suffixes=(".weight", ".bias"))
        count = heads.get(name.split(".")[-2]) if interleaved else None
        names[there] = (name, count)
        kind = kinds[turns % len(kinds)] if tensor.ndim == 2 else Kind.F32
        turns += tensor.ndim == 2
        tensors[there] = (tensor if count is None else _pairs(tensor, count), kind)
    fields = {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        "tokenizer.ggml.tokens": ["a", "bc"],
        **(more or {}),
    }
    values = write_gguf(path, tensors, fields, arch)
    turned = ((*names[n], v) for n, v in values.items())
    return {name: v if count is None else _halves(v, count) for name, count, v in turned}


def _pairs(t: Tensor, heads: int) -> Tensor:
    """Returns rows in llama.cpp's order: the two rows of a rotary pair next to each other."""
    return t.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def _halves(t: Tensor, heads: int) -> Tensor:
    return t.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
