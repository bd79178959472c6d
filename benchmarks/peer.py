"""The interface of peers in the whole-model benchmark: other ways to run a model, never
required."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from benchmarks.subjects import Inputs

# The hidden state, then the logits where the model has them; None for what a peer does not give.
Answers = Sequence[Tensor | None]
Run = Callable[[], Answers]
Prepare = Callable[[nn.Module, Inputs], Run]
# The others are imported by the name that pip knows.
MODULES = {
    "llama-cpp-python": "llama_cpp",
    "onnx-ir": "onnx_ir",
    "onnxruntime-genai": "onnxruntime_genai",
    "openvino-genai": "openvino_genai",
    "openvino-tokenizers": "openvino_tokenizers",
    "optimum-quanto": "optimum.quanto",
}


class UnsupportedError(Exception):
    """Raised if a peer is installed but cannot run this model. The message says why, in one
    sentence."""


@dataclass(frozen=True)
class Peer:
    """A peer. `prepare(model, inputs)` returns a call that runs the model on these inputs and
    imports what it needs. `packages`: those it needs, by their names for pip."""

    prepare: Prepare
    packages: tuple[str, ...] = ()


def missing(packages: Sequence[str]) -> str | None:
    """Returns what to install, as a sentence, or None if all packages are installed."""
    lacks = [p for p in packages if not _is_there(MODULES.get(p, p))]
    return f"Not installed: pip install {' '.join(lacks)}." if lacks else None


def _is_there(module: str) -> bool:
    """Whether a module is installed. `find_spec` of a part of a package imports the package, so the
    package is checked first."""
    package = module.partition(".")[0]
    return bool(importlib.util.find_spec(package) and importlib.util.find_spec(module))
