"""llama.cpp with weights in Q8_0; activations are quantized in the same kind of blocks.

`llama-cpp-python` is built during installation, for the instructions of the processor.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import smollm
from benchmarks.gguf_file import check, gguf_file
from benchmarks.peer import Run, UnsupportedError
from benchmarks.subjects import Decode, Inputs, Prefill

# Model, tokens: whether this build of llama.cpp can run it. In a process of its own, which a crash
# ends: GCC 12 leaves the AMX configuration of a build without `-fno-tree-dse -fno-dse` unwritten.
PROBE = """
import sys, llama_cpp
count = int(sys.argv[2])
llama = llama_cpp.Llama(sys.argv[1], n_ctx=count, n_batch=count, n_threads=1, verbose=False)
llama.eval([0] * count)
"""


def llama_cpp_q8(model: nn.Module, inputs: Inputs) -> Run:
    """Runs a model by llama.cpp. It keeps a cache of its own, which is cut back to the past before
    each call. It returns logits and no hidden state."""
    inner: Any = model.model
    _check(model, inner.config, len(inputs[0]))
    import llama_cpp

    told = model.told[0] if isinstance(model, Decode) else []
    tokens = inputs[0][0].tolist()
    length = len(told) + len(tokens)
    path = _file(inner)
    _probe(path, length)
    threads = dict.fromkeys(("n_threads", "n_threads_batch"), torch.get_num_threads())
    sizes = dict.fromkeys(("n_ctx", "n_batch", "n_ubatch"), length)
    llama = llama_cpp.Llama(str(path), **sizes, **threads, logits_all=True, verbose=False)
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
    if batch != 1:
        raise UnsupportedError(f"llama.cpp runs one text at a time here, and these are {batch}.")
    check(config)


def _file(inner: Any) -> Path:
    """Returns the file of a model of random weights. The converter requires a tokenizer, and gets
    that of SmolLM2."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        inner.save_pretrained(folder)
        AutoTokenizer.from_pretrained(smollm.converted()).save_pretrained(folder)
        return gguf_file(inner, Path(folder), "Q8_0")


def _probe(path: Path, tokens: int) -> None:
    command = [sys.executable, "-c", PROBE, str(path), str(tokens)]
    status = subprocess.run(command, capture_output=True).returncode
    if status < 0:
        raise UnsupportedError(
            f"This build of llama.cpp is ended by signal {-status} on this processor."
        )
