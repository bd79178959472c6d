"""llama.cpp with weights in Q8_0: language models of Llama's kind, written as GGUF here.

Rows of Q8_0 are blocks of 32 codes with a scale of 16 bits; activations are quantized in such
blocks too. Norms are float32. `llama-cpp-python` is built where it is installed, for the
instructions of that processor.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.converted import converted
from benchmarks.peer import Run, UnsupportedError
from benchmarks.subjects import Decode, Inputs, Prefill

BLOCK = 32
# Model, tokens: whether this build of llama.cpp can run it. In a process of its own, which a crash
# ends: GCC 12 leaves the AMX configuration of a build without `-fno-tree-dse -fno-dse` unwritten.
PROBE = """
import sys, llama_cpp
count = int(sys.argv[2])
llama = llama_cpp.Llama(sys.argv[1], n_ctx=count, n_batch=count, n_threads=1, verbose=False)
llama.eval([0] * count)
"""


def llama_cpp_q8(model: nn.Module, inputs: Inputs) -> Run:
    """It keeps a cache of its own, which is cut back to the past before each call. It gives logits
    and no hidden state."""
    inner: Any = model.model
    _check(model, inner.config, len(inputs[0]))
    import llama_cpp

    told = model.told[0] if isinstance(model, Decode) else []
    tokens = inputs[0][0].tolist()
    length = len(told) + len(tokens)
    path = gguf_file(inner, "Q8_0")
    _probe(path, length)
    threads = torch.get_num_threads()
    llama = llama_cpp.Llama(
        str(path),
        n_ctx=length,
        n_batch=length,
        n_ubatch=length,
        n_threads=threads,
        n_threads_batch=threads,
        logits_all=True,
        verbose=False,
    )
    if told:
        llama.eval(told)

    def run() -> tuple[None, Tensor]:
        llama.n_tokens = len(told)
        llama.eval(tokens)
        return None, torch.from_numpy(llama.scores[None, len(told) : length])

    return run


def _check(model: nn.Module, config: Any, batch: int) -> None:
    if not isinstance(model, Prefill | Decode):
        kind = type(config).__name__
        raise UnsupportedError(f"llama.cpp is for language models, and {kind} is none.")
    if config.model_type != "llama":
        kind = config.model_type
        raise UnsupportedError(f"GGUF files are written here for Llama's kind, and this is {kind}.")
    if batch != 1:
        raise UnsupportedError(f"llama.cpp runs one text at a time here, and these are {batch}.")
    if config.hidden_size % BLOCK or config.intermediate_size % BLOCK:
        sizes = f"{config.hidden_size} and {config.intermediate_size}"
        raise UnsupportedError(f"Q8_0 has blocks of {BLOCK}, which do not divide {sizes}.")


def _probe(path: Path, tokens: int) -> None:
    command = [sys.executable, "-c", PROBE, str(path), str(tokens)]
    status = subprocess.run(command, capture_output=True).returncode
    if status < 0:
        raise UnsupportedError(
            f"This build of llama.cpp is ended by signal {-status} on this processor."
        )


def gguf_file(inner: Any, kind: str) -> Path:
    """The weights of a LlamaModel in "Q8_0" or "Q4_0", the embedding too, which is the head."""
    import gguf

    form = f"gguf-{kind.lower()}-{gguf.GGUF_VERSION}"
    return converted(form, inner, partial(_write, inner, kind))


def _write(inner: Any, kind: str, path: Path) -> None:
    import gguf

    config = inner.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
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
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {
        "q_proj.weight": config.num_attention_heads,
        "k_proj.weight": config.num_key_value_heads,
    }
    for name, tensor in inner.state_dict().items():
        for ending, count in heads.items():
            tensor = _interleaved(tensor, count) if name.endswith(ending) else tensor
        known = names.get_name(name, try_suffixes=(".weight",))
        assert known is not None, name
        data = tensor.numpy()
        if tensor.ndim == 1:
            writer.add_tensor(known, data)
            continue
        writer.add_tensor(known, gguf.quants.quantize(data, kind), raw_dtype=kind)


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows in llama.cpp's order for rotary positions: the two of a pair beside each other, where
    `transformers` has them half a head apart."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape).contiguous()
