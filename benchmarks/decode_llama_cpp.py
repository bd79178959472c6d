"""llama.cpp as benchmarks/decode.py runs it: its library, from the same weights in Q8_0 or Q4_0.

The library is a prebuilt one, which chooses among builds for many processors:
    npm install --ignore-scripts node-llama-cpp
A few of its functions are called directly. Only the first fields of their structures are declared
here, which have not changed for years.
"""

from __future__ import annotations

import ctypes as c
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import ROOT
from benchmarks.decode_static import Case
from benchmarks.gguf_file import gguf_file
from benchmarks.peer import UnsupportedError

FOLDER = ROOT / "node_modules/@node-llama-cpp/linux-x64/bins/linux-x64"
ROWS = 512  # of a batch of the prefill, as llama.cpp has it by default


# What it would log; kept here, as llama.cpp calls it later.
QUIET = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)(lambda *_: None)


class _Parameters(c.Structure):
    """A structure that is larger than the real ones: they are passed on the stack, by value, and
    not written."""

    _fields_ = (
        ("n_ctx", c.c_uint32),
        ("n_batch", c.c_uint32),
        ("n_ubatch", c.c_uint32),
        ("n_seq_max", c.c_uint32),
        ("more", c.c_byte * 1024),
    )


class _Batch(c.Structure):
    _fields_ = (
        ("n_tokens", c.c_int32),
        ("token", c.POINTER(c.c_int32)),
        ("embd", c.c_void_p),
        ("pos", c.POINTER(c.c_int32)),
        ("n_seq_id", c.POINTER(c.c_int32)),
        ("seq_id", c.POINTER(c.POINTER(c.c_int32))),
        ("logits", c.POINTER(c.c_int8)),
    )


@cache
def library(folder: Path = FOLDER) -> Any:
    """Returns libllama with its functions declared. Raises UnsupportedError if it is missing."""
    found = sorted(folder.glob("libllama.*"))
    if not found:
        raise UnsupportedError(
            "Not installed: npm install --ignore-scripts node-llama-cpp, in the folder of qfx."
        )
    ggml = c.CDLL(str(next(folder.glob("libggml.*"))), mode=c.RTLD_GLOBAL)
    ggml.ggml_backend_load_all_from_path(str(folder).encode())
    llama = c.CDLL(str(found[0]))
    pointer = c.c_void_p
    for name, gives, takes in (
        ("llama_model_default_params", _Parameters, []),
        ("llama_model_load_from_file", pointer, [c.c_char_p, _Parameters]),
        ("llama_context_default_params", _Parameters, []),
        ("llama_init_from_model", pointer, [pointer, _Parameters]),
        ("llama_set_n_threads", None, [pointer, c.c_int32, c.c_int32]),
        ("llama_batch_init", _Batch, [c.c_int32, c.c_int32, c.c_int32]),
        ("llama_decode", c.c_int32, [pointer, _Batch]),
        ("llama_get_logits_ith", c.POINTER(c.c_float), [pointer, c.c_int32]),
        ("llama_get_memory", pointer, [pointer]),
        ("llama_memory_clear", None, [pointer, c.c_bool]),
        ("llama_log_set", None, [pointer, pointer]),
    ):
        function = getattr(llama, name)
        function.restype, function.argtypes = gives, takes
    llama.llama_log_set(QUIET, None)
    llama.llama_backend_init()
    return llama


class LlamaCpp:
    """A decoder in which each text of the batch is a sequence of its own; logits are requested only
    for last tokens."""

    def __init__(self, kind: str, case: Case, model: Any) -> None:
        self.llama = library()
        self.vocabulary = model.config.vocab_size
        path = gguf_file(model.model, kind)
        self.weights = path.stat().st_size
        loaded = self.llama.llama_model_load_from_file(
            str(path).encode(), self.llama.llama_model_default_params()
        )
        own = self.llama.llama_context_default_params()
        own.n_ctx, own.n_seq_max = case.batch * -(-case.length // 256) * 256, case.batch
        own.n_batch = own.n_ubatch = ROWS
        self.context = self.llama.llama_init_from_model(loaded, own)
        if not self.context:
            raise UnsupportedError("llama.cpp has made no context.")
        threads = torch.get_num_threads()
        self.llama.llama_set_n_threads(self.context, threads, threads)
        self.batch = self.llama.llama_batch_init(ROWS, 0, 1)
        self.told = 0

    def prefill(self, tokens: Tensor) -> Tensor:
        self.llama.llama_memory_clear(self.llama.llama_get_memory(self.context), True)
        self.told = 0
        found = []
        for text, row in enumerate(tokens.tolist()):
            for start in range(0, len(row), ROWS):
                part = row[start : start + ROWS]
                last = start + len(part) == len(row)
                places = range(start, start + len(part))
                self._decode([(t, p, text, False) for t, p in zip(part, places, strict=True)], last)
            found.append(self._logits(self.batch.n_tokens - 1))
        self.told = tokens.shape[1]
        return torch.stack(found)

    def prepare(self) -> None:
        pass

    def step(self, token: Tensor) -> Tensor:
        rows = [(t, self.told, text, True) for text, (t,) in enumerate(token.tolist())]
        self._decode(rows, True)
        self.told += 1
        return torch.stack([self._logits(i) for i in range(len(rows))])

    def _decode(self, rows: list[tuple[int, int, int, bool]], last: bool) -> None:
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, place, text, asked) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, place, asked
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, text
        batch.logits[len(rows) - 1] = last
        status = self.llama.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode gave {status} for {len(rows)} tokens")

    def _logits(self, row: int) -> Tensor:
        """Returns a copy of the logits, which llama.cpp keeps until the next call."""
        found = self.llama.llama_get_logits_ith(self.context, row)
        array = (c.c_float * self.vocabulary).from_address(c.addressof(found.contents))
        return torch.frombuffer(array, dtype=torch.float32).clone()
