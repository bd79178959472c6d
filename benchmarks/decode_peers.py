"""Other libraries that decode on a CPU, for benchmarks/decode.py; none is required."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.converted import converted
from benchmarks.decode_llama_cpp import LlamaCpp
from benchmarks.decode_openvino import PACKAGES, OpenVino, int4_weights
from benchmarks.decode_static import Case, Static
from benchmarks.decode_ways import Way
from benchmarks.peer import UnsupportedError
from benchmarks.peers import RECIPE, int8_weights


def torchao(settings: dict[str, Any], case: Case, model: Any) -> Static:
    """Runs W8A8, compiled with frozen weights."""
    from torch._inductor import config
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    config.freezing = True  # of this process
    for name, value in settings.items():
        setattr(config, name, value)
    quantize_(model, Int8DynamicActivationInt8WeightConfig(set_inductor_config=False))
    return Static(case, model, partial(torch.compile, backend=case.inner))


class OnnxGenAI:
    """ONNX Runtime GenAI with 4 bits in groups of 32 and activations of 8 bits, as its model
    builder makes it for CPUs. Tokens are appended, so that it does not search."""

    def __init__(self, case: Case, model: Any) -> None:
        import onnxruntime_genai as og

        if case.batch != 1:
            raise UnsupportedError(
                f"ONNX Runtime GenAI appends tokens to one text only, and these are {case.batch}."
            )
        folder = converted(f"onnx-genai-int4-{og.__version__}", model, partial(_build, case.folder))
        self.weights = sum(p.stat().st_size for p in folder.glob("*.data"))
        options = {"intra_op_num_threads": torch.get_num_threads()}
        config = og.Config(str(folder))
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self.model = og.Model(config)
        given = og.GeneratorParams(self.model)
        given.set_search_options(max_length=case.length, batch_size=case.batch, do_sample=False)
        self.generator: Any = None
        self.new = partial(og.Generator, self.model, given)

    def prefill(self, tokens: Tensor) -> Tensor:
        self.generator = self.new()
        return self.step(tokens)

    def prepare(self) -> None:
        pass

    def step(self, token: Tensor) -> Tensor:
        self.generator.append_tokens(token.int().numpy())
        return torch.from_numpy(self.generator.get_logits())[:, -1]


def _build(source: Path, folder: Path) -> None:
    """Builds the model by the command line that the documentation describes."""
    given = {"-i": source, "-o": folder, "-c": folder, "-p": "int4", "-e": "cpu"}
    options = ("int4_accuracy_level=4", "int4_block_size=32", "hf_token=false")
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    command += [str(word) for pair in given.items() for word in pair]
    subprocess.run([*command, "--extra_options", *options], check=True, capture_output=True)


AO = ("torchao",)
PEERS: dict[str, Way] = {
    "llama.cpp Q8_0": Way(partial(LlamaCpp, "Q8_0"), ("gguf",)),
    "llama.cpp Q4_0": Way(partial(LlamaCpp, "Q4_0"), ("gguf",)),
    "ONNX Runtime GenAI int4": Way(OnnxGenAI, ("onnxruntime-genai", "onnx", "onnx-ir")),
    "OpenVINO GenAI int8": Way(partial(OpenVino, int8_weights), PACKAGES),
    "OpenVINO GenAI int4": Way(partial(OpenVino, int4_weights), PACKAGES),
    "torchao W8A8": Way(partial(torchao, {}), AO),
    "torchao W8A8 by its recipe": Way(partial(torchao, RECIPE), AO),
}
