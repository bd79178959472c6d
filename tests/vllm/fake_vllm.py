"""The classes of vLLM that qfx.vllm extends, and the functions that it calls, with what they do as
far as it depends on that; vLLM itself needs an environment of its own (docs/vllm.md)."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

LAYERS = "vllm.model_executor.layers"


class Logger(logging.LoggerAdapter):  # type: ignore[type-arg]
    """Has vLLM's methods besides."""

    def warning_once(self, *args: Any) -> None:
        self.warning(*args)


class QuantizationConfig:
    """As vLLM's; the model sets the mapping."""

    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}


class LinearMethodBase:
    """As vLLM's."""


class UnquantizedLinearMethod(LinearMethodBase):
    """As vLLM's."""


class UnquantizedEmbeddingMethod:
    """As vLLM's."""


class Layer(nn.Module):
    """A layer whose method creates its weight, loads it and multiplies by it, as vLLM's."""

    def __init__(self, method: Any, n: int, k: int, dtype: torch.dtype, bias: bool = False) -> None:
        super().__init__()
        self.quant_method = method
        method.create_weights(self, k, [n], k, n, dtype, weight_loader=None)
        made = torch.randn(n, dtype=dtype)
        self.bias = nn.Parameter(made, requires_grad=False) if bias else None

    def load(self, weight: Tensor) -> None:
        """As vLLM does once all parts of a weight have been read, also if it loads again."""
        self.__dict__.pop("_already_called_process_weights_after_loading", None)
        self.register_parameter("weight", nn.Parameter(weight.clone(), requires_grad=False))
        self.quant_method.process_weights_after_loading(self)
        self.quant_method.process_weights_after_loading(self)  # for all layers in the end

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.quant_method.apply(self, x, self.bias)
        return result


class LinearBase(Layer):
    """As vLLM's."""


class VocabParallelEmbedding(nn.Module):
    """As vLLM's."""


class ParallelLMHead(Layer, VocabParallelEmbedding):
    """As vLLM's."""


class FusedMoE(nn.Module):
    """As vLLM's."""


class ModelWeightParameter(nn.Parameter):
    """As vLLM's."""

    def __new__(cls, data: Tensor, **loading: Any) -> Any:
        return super().__new__(cls, data, requires_grad=False)  # type: ignore[call-arg]


CONFIGS: dict[str, Any] = {}
WAITING: list[nn.Module] = []  # layers that are loaded part by part


def register_quantization_config(name: str) -> Any:
    return lambda made: CONFIGS.setdefault(name, made)


def replace_parameter(layer: nn.Module, name: str, tensor: Tensor) -> None:
    layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


_CONTENTS: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm.logger": {"init_logger": lambda name: Logger(logging.getLogger(name))},
    "vllm.model_executor": {},
    LAYERS: {},
    f"{LAYERS}.linear": {
        "LinearBase": LinearBase,
        "LinearMethodBase": LinearMethodBase,
        "UnquantizedLinearMethod": UnquantizedLinearMethod,
    },
    f"{LAYERS}.quantization": {"register_quantization_config": register_quantization_config},
    f"{LAYERS}.quantization.base_config": {"QuantizationConfig": QuantizationConfig},
    f"{LAYERS}.vocab_parallel_embedding": {
        "ParallelLMHead": ParallelLMHead,
        "UnquantizedEmbeddingMethod": UnquantizedEmbeddingMethod,
    },
    "vllm.model_executor.model_loader": {},
    "vllm.model_executor.model_loader.reload": {},
    "vllm.model_executor.model_loader.reload.layerwise": {
        "initialize_online_processing": WAITING.append
    },
    "vllm.model_executor.parameter": {"ModelWeightParameter": ModelWeightParameter},
    "vllm.model_executor.utils": {"replace_parameter": replace_parameter},
}


@contextmanager
def installed() -> Iterator[None]:
    """Makes `import vllm` find these; what was imported with them is forgotten at the end."""
    for name, contents in _CONTENTS.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(contents)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in [*sys.modules]:
            if name in _CONTENTS or name in ("qfx.vllm.linears", "qfx.vllm.quantization"):
                del sys.modules[name]
        CONFIGS.clear()
        WAITING.clear()
