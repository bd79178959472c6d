"""llama.cpp, the peer of benchmarks/decode.py, which is not required.

Its own converter makes its files, once, from the folder of the float32 model.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.converted import converted
from benchmarks.decode_ways import Case, Way
from benchmarks.peer import UnsupportedError

VARIABLE = "LLAMA_CPP"  # the folder of llama.cpp's sources, which contain the converter


class LlamaCpp:
    """llama.cpp, in which each text of the batch is a sequence of its own; logits are requested
    only for last tokens."""

    ROWS = 512  # of a call of the prefill, as llama.cpp has it by default

    def __init__(self, kind: str, case: Case, model: Any) -> None:
        import llama_cpp

        self.llama, self.vocabulary = llama_cpp, model.config.vocab_size
        write = partial(_written, case.folder, kind)
        path = converted(f"gguf-{kind.lower()}", model, write)
        self.weights = path.stat().st_size
        llama_cpp.llama_backend_init()
        loaded = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        given = llama_cpp.llama_context_default_params()
        given.n_ctx, given.n_seq_max = case.batch * -(-case.length // 256) * 256, case.batch
        given.n_batch = given.n_ubatch = self.ROWS
        given.n_threads = given.n_threads_batch = torch.get_num_threads()
        self.context = llama_cpp.llama_init_from_model(loaded, given)
        if not self.context:
            raise UnsupportedError("llama.cpp has made no context.")
        self.batch = llama_cpp.llama_batch_init(self.ROWS, 0, 1)
        self.told = 0

    def prefill(self, tokens: Tensor) -> Tensor:
        self.llama.llama_memory_clear(self.llama.llama_get_memory(self.context), True)
        found = []
        for text, row in enumerate(tokens.tolist()):
            for start in range(0, len(row), self.ROWS):
                part = enumerate(row[start : start + self.ROWS], start)
                last = self._decode([(token, place, text) for place, token in part], every=False)
            found += last
        self.told = tokens.shape[1]
        return torch.stack(found)

    def prepare(self) -> None:
        pass

    def step(self, token: Tensor) -> Tensor:
        rows = [(t, self.told, text) for text, (t,) in enumerate(token.tolist())]
        self.told += 1
        return torch.stack(self._decode(rows, every=True))

    def _decode(self, rows: list[tuple[int, int, int]], every: bool) -> list[Tensor]:
        """Reads tokens with their places and sequences; returns the logits of every token, or of
        the last."""
        batch, count = self.batch, len(rows)
        batch.n_tokens = count
        for i, (token, place, text) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, place, every or i == count - 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, text
        if status := self.llama.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode gave {status} for {count} tokens")
        return [self._logits(i) for i in (range(count) if every else [count - 1])]

    def _logits(self, row: int) -> Tensor:
        """Returns a copy of the logits, which llama.cpp keeps until the next call."""
        found = self.llama.llama_get_logits_ith(self.context, row)
        return torch.from_numpy(np.ctypeslib.as_array(found, (self.vocabulary,)).copy())


def _written(folder: Path, kind: str, path: Path) -> None:
    """Writes the file of a model saved in `folder` with its tokenizer, in Q8_0 or Q4_0."""
    import llama_cpp

    script = Path(os.environ.get(VARIABLE, "llama.cpp")) / "convert_hf_to_gguf.py"
    if not script.exists():
        raise UnsupportedError(f"There is no {script}: set {VARIABLE} to llama.cpp's sources.")
    whole = path.with_suffix(".f32")
    command = [sys.executable, str(script), str(folder), "--outtype", "f32", "--outfile"]
    done = subprocess.run([*command, str(whole)], capture_output=True, text=True)
    if done.returncode:
        raise UnsupportedError(["The converter failed.", *done.stderr.strip().splitlines()][-1])
    given = llama_cpp.llama_model_quantize_default_params()
    given.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    names = str(whole).encode(), str(path).encode()
    if status := llama_cpp.llama_model_quantize(*names, ctypes.byref(given)):
        raise UnsupportedError(f"llama.cpp does not quantize to {kind}: it gave {status}.")


PEERS: dict[str, Way] = {
    f"llama.cpp {kind}": Way(partial(LlamaCpp, kind), ("gguf", "llama-cpp-python"))
    for kind in ("Q8_0", "Q4_0")
}
