"""Other libraries that decode on a CPU, for benchmarks/decode.py; none is required.

Their model files are made by their own converters, once, from the folder of the float32 model.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.converted import converted
from benchmarks.decode_ways import Case, Static, Way
from benchmarks.gguf_file import gguf_file
from benchmarks.peer import UnsupportedError
from benchmarks.peers import GROUP, RECIPE


def torchao(settings: dict[str, Any], case: Case, model: Any) -> Static:
    """Runs W8A8, compiled with frozen weights."""
    from torch._inductor import config
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    config.freezing = True  # of this process
    for name, value in settings.items():
        setattr(config, name, value)
    size = sum(m.weight.numel() for m in model.modules() if type(m) is torch.nn.Linear)
    quantize_(model, Int8DynamicActivationInt8WeightConfig(set_inductor_config=False))
    decoder = Static(case, model, partial(torch.compile, backend=case.inner))
    decoder.weights = size
    return decoder


class LlamaCpp:
    """llama.cpp, in which each text of the batch is a sequence of its own; logits are requested
    only for last tokens."""

    ROWS = 512  # of a call of the prefill, as llama.cpp has it by default

    def __init__(self, kind: str, case: Case, model: Any) -> None:
        import llama_cpp

        self.llama, self.vocabulary = llama_cpp, model.config.vocab_size
        path = gguf_file(model, case.folder, kind)
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


class OpenVino:
    """OpenVINO GenAI. A step is a call of OpenVINO's runtime, and `generate` that of a pipeline on
    the same files."""

    def __init__(self, weights: str, case: Case, model: Any) -> None:
        import openvino

        form = f"openvino-{weights}-{openvino.__version__[:10]}"
        self.folder = converted(form, model, partial(_exported, case.folder, weights))
        self.weights = (self.folder / "openvino_model.bin").stat().st_size
        self.options = {
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "INFERENCE_PRECISION_HINT": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": GROUP,
        }
        path, core = self.folder / "openvino_model.xml", openvino.Core()
        self.request = core.compile_model(path, "CPU", self.options).create_infer_request()
        self.texts, self.told = case.batch, 0
        self.pipeline: Any = None

    def prefill(self, tokens: Tensor) -> Tensor:
        self.request.reset_state()
        self.told = 0
        return self.step(tokens)

    def prepare(self) -> None:
        pass

    def step(self, token: Tensor) -> Tensor:
        told = self.told + token.shape[1]
        given = {
            "input_ids": token.numpy(),
            "attention_mask": np.ones((self.texts, told), np.int64),
            "position_ids": np.tile(np.arange(self.told, told), (self.texts, 1)),
            "beam_idx": np.arange(self.texts, dtype=np.int32),
        }
        self.told = told
        found = self.request.infer(given, share_inputs=True, share_outputs=True)
        return torch.from_numpy(found["logits"][:, -1].copy())

    def generate(self, tokens: Tensor, new: int) -> Tensor:
        """Generates greedily and returns sequences [B, new]."""
        import openvino
        import openvino_genai as genai

        if self.pipeline is None:
            # The graph of the step: its other way, by pages, is made for many requests at once.
            options = {**self.options, "ATTENTION_BACKEND": "SDPA"}
            self.pipeline = genai.LLMPipeline(self.folder, "CPU", **options)
        told = genai.TokenizedInputs(
            openvino.Tensor(tokens.numpy()), openvino.Tensor(torch.ones_like(tokens).numpy())
        )
        config = genai.GenerationConfig(max_new_tokens=new, ignore_eos=True, do_sample=False)
        return torch.tensor(self.pipeline.generate(told, config).tokens)


def _exported(source: Path, weights: str, folder: Path) -> None:
    """Exports by the command line of optimum-intel, which may be installed in an environment of its
    own."""
    if shutil.which("optimum-cli") is None:
        raise UnsupportedError("There is no optimum-cli on the PATH: install optimum-intel.")
    command = ["optimum-cli", "export", "openvino", "--model", str(source), "--sym"]
    command += ["--task", "text-generation-with-past", "--weight-format", weights]
    command += ["--group-size", str(GROUP), "--ratio", "1"] if weights == "int4" else []
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True)
    if done.returncode:
        raise UnsupportedError(["optimum-cli failed.", *done.stderr.strip().splitlines()][-1])


def _peer(make: Callable[..., Any], what: Any, *packages: str) -> Way:
    return Way(partial(make, what), packages)


GENAI = ("openvino", "openvino-genai", "openvino-tokenizers")
PEERS: dict[str, Way] = {
    "llama.cpp Q8_0": _peer(LlamaCpp, "Q8_0", "gguf", "llama-cpp-python"),
    "llama.cpp Q4_0": _peer(LlamaCpp, "Q4_0", "gguf", "llama-cpp-python"),
    "OpenVINO GenAI int8": _peer(OpenVino, "int8", *GENAI),
    "OpenVINO GenAI int4": _peer(OpenVino, "int4", *GENAI),
    "torchao W8A8": _peer(torchao, {}, "torchao"),
    "torchao W8A8 by its recipe": _peer(torchao, RECIPE, "torchao"),
}
