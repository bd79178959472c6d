"""The classes of vLLM that qfx.vllm extends, and the functions that it calls, with what they do as
far as it depends on that; vLLM itself needs an environment of its own (docs/vllm.md)."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.vllm import fake_attention

LAYERS = "vllm.model_executor.layers"


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


class Loaded(LinearBase):
    """A linear of vLLM with the tensors of a checkpoint: it unites several by their rows, `sizes`,
    and one of `ranks` has some rows of each, or some columns."""

    def __init__(
        self,
        method: Any,
        sizes: list[int],
        k: int,
        rank: int = 0,
        ranks: int = 1,
        cut: str = "rows",
    ) -> None:
        nn.Module.__init__(self)
        self.quant_method, self.bias, self.cut = method, None, cut
        self.rank, rows, columns = rank, *((ranks, 1) if cut == "rows" else (1, ranks))
        self.sizes = [size // rows for size in sizes]
        self.made = (k // columns, self.sizes, k, sum(sizes), torch.float32)
        self.renew()

    def renew(self) -> None:
        """As vLLM does before it loads again."""
        self.__dict__.pop("_already_called_process_weights_after_loading", None)
        loader = self.weight_loader
        self.quant_method.create_weights(self, *self.made, weight_loader=loader)

    def weight_loader(self, param: Any, loaded: Tensor, shard: int | None = None) -> None:
        to, dim = param.data, getattr(param, "output_dim", None)
        if self.cut != "rows":
            dim = getattr(param, "input_dim", None)
        elif dim is not None and shard is not None:
            to = to.narrow(dim, sum(self.sizes[:shard]), self.sizes[shard])
        if dim is not None:
            loaded = loaded.narrow(dim, self.rank * to.shape[dim], to.shape[dim])
        assert to.shape == loaded.shape
        to.copy_(loaded)

    def take(self, *states: dict[str, Tensor]) -> None:
        """Loads the tensors of each of the united linears, and then the next layers."""
        for shard, state in enumerate(states):
            for name, tensor in state.items():
                if name != "bias":
                    param: Any = getattr(self, name)
                    param.weight_loader(param, tensor, *([shard] if len(states) > 1 else []))
        self.quant_method.process_weights_after_loading(self)
        self.quant_method.process_weights_after_loading(self)


class Vocabulary(VocabParallelEmbedding):
    """An embedding or head with the tensors of a checkpoint, padded to 64 rows."""

    def __init__(self, method: Any, n: int, d: int, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        padded = -(-n // 64) * 64
        self.quant_method, self.bias = method, None
        self.shard_indices = SimpleNamespace(num_org_elements=n)
        how = (d, [padded], d, padded)
        method.create_weights(self, *how, params_dtype=dtype, weight_loader=self.weight_loader)

    def weight_loader(self, param: Any, loaded: Tensor) -> None:
        if getattr(param, "output_dim", None) is None:
            assert param.shape == loaded.shape
            param.data.copy_(loaded)
            return
        param.data[: len(loaded)] = loaded
        param.data[len(loaded) :] = 0

    take = Loaded.take

    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.quant_method.embedding(self, ids.long())
        return rows


class VocabularyHead(Vocabulary, ParallelLMHead):
    """As `ParallelLMHead` of vLLM."""

    def forward(self, x: Tensor) -> Tensor:
        return ParallelLMHead.forward(self, x)


class GateLinear(LinearBase):
    """As vLLM's."""


class RoutedExperts(nn.Module):
    """As vLLM's, without a router."""

    expert_map: Tensor | None = None

    def __init__(self, activation: str = "silu", bias: bool = False) -> None:
        super().__init__()
        self.activation = Activation(activation)
        self.swiglu_limit = self.swiglu_alpha = self.swiglu_beta = None
        self.moe_config = SimpleNamespace(has_bias=bias, w13_num_shards=1 + (activation != "none"))
        self.apply_router_weight_on_input = False
        self.quant_method: Any = None

    def create(self, method: Any, count: int, width: int, k: int) -> None:
        """As the constructor of vLLM's, once it has a method."""
        self.local_num_experts = count
        self.quant_method = method
        method.create_weights(self, count, k, width, torch.float32, weight_loader=None)

    def load(self, **weights: Tensor) -> None:
        """As vLLM does once the weights of all experts have been read."""
        self.__dict__.pop("_already_called_process_weights_after_loading", None)
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight.clone(), requires_grad=False))
        self.quant_method.process_weights_after_loading(self)
        self.quant_method.process_weights_after_loading(self)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        result: Tensor = self.quant_method.apply(self, x, weights, ids, None, None)
        return result


class Activation(NamedTuple):
    """As vLLM's enum."""

    value: str


class UnquantizedFusedMoEMethod:
    """As vLLM's."""

    def __init__(self, moe: Any) -> None:
        self.processed: list[nn.Module] = []

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.processed.append(layer)


class OnlineMoEMethodBase:
    """As vLLM's."""

    def __init__(self, moe: Any) -> None:
        self.moe, self.moe_kernel = moe, None

    def create_weights(
        self, layer: nn.Module, count: int, k: int, width: int, dtype: torch.dtype, **loading: Any
    ) -> None:
        rows = self.moe.w13_num_shards * width
        shapes = {"w13_weight": (count, rows, k), "w2_weight": (count, k, width)}
        if self.moe.has_bias:
            shapes |= {"w13_bias": (count, rows), "w2_bias": (count, k)}
        for name, shape in shapes.items():
            made = torch.empty(shape, dtype=dtype, device="meta")
            layer.register_parameter(name, nn.Parameter(made, requires_grad=False))
        WAITING.append(layer)


class ModelWeightParameter(nn.Parameter):
    """As vLLM's."""

    def __new__(cls, data: Tensor, **loading: Any) -> Any:
        return super().__new__(cls, data, requires_grad=False)  # type: ignore[call-arg]


WITH_VLLM = [
    f"qfx.vllm.{name}"
    for name in (
        "cache",
        "checkpoint",
        "counting",
        "experts",
        "kernels",
        "linears",
        "quantization",
        "saved_experts",
    )
]


class Int8ScaledMMLinearKernel:
    """As vLLM's."""

    def __init__(self, config: Any, names: list[str]) -> None:
        assert self.can_implement(config)[0]  # type: ignore[attr-defined]
        self.config, self.layer_param_names = config, names


class MPLinearKernel:
    """As vLLM's."""

    def __init__(self, config: Any, codes: str, scales: str) -> None:
        self.config, self.w_q_name, self.w_s_name = config, codes, scales


def permute_param_layout_(param: Any, input_dim: int, output_dim: int, **packed: int) -> None:
    if param.input_dim != input_dim:
        param.data = param.data.t()
        param.input_dim, param.output_dim = input_dim, output_dim


CPU = "cpu"
KERNELS: dict[tuple[str, str], list[Any]] = {}  # by platform and type


def register_linear_kernel(kernel: type, platform: str, kernel_type: str = "mp") -> None:
    KERNELS.setdefault((platform, kernel_type), []).append(kernel)


CURRENT: list[Any] = []  # the configuration of the engine
CONFIGS: dict[str, Any] = {}
WAITING: list[nn.Module] = []  # layers that are loaded part by part


class Loading:
    """As vLLM's record of what was loaded for a layer; here all was."""

    load_numel = 1

    def can_load(self) -> bool:
        return True


def register_quantization_config(name: str) -> Any:
    return lambda made: CONFIGS.setdefault(name, made)


def replace_parameter(layer: nn.Module, name: str, tensor: Tensor) -> None:
    layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


_CONTENTS: dict[str, dict[str, Any]] = {
    **fake_attention.CONTENTS,
    "vllm": {},
    "vllm.config": {"get_current_vllm_config_or_none": lambda: CURRENT[0] if CURRENT else None},
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.model_executor": {},
    LAYERS: {},
    f"{LAYERS}.linear": {
        "LinearBase": LinearBase,
        "LinearMethodBase": LinearMethodBase,
        "UnquantizedLinearMethod": UnquantizedLinearMethod,
    },
    f"{LAYERS}.fused_moe": {"GateLinear": GateLinear, "RoutedExperts": RoutedExperts},
    f"{LAYERS}.fused_moe.unquantized_fused_moe_method": {
        "UnquantizedFusedMoEMethod": UnquantizedFusedMoEMethod
    },
    f"{LAYERS}.quantization.online": {},
    f"{LAYERS}.quantization.online.moe_base": {"OnlineMoEMethodBase": OnlineMoEMethodBase},
    f"{LAYERS}.quantization": {"register_quantization_config": register_quantization_config},
    f"{LAYERS}.quantization.base_config": {"QuantizationConfig": QuantizationConfig},
    f"{LAYERS}.vocab_parallel_embedding": {
        "ParallelLMHead": ParallelLMHead,
        "UnquantizedEmbeddingMethod": UnquantizedEmbeddingMethod,
        "VocabParallelEmbedding": VocabParallelEmbedding,
    },
    "vllm.model_executor.model_loader": {},
    "vllm.model_executor.model_loader.reload": {},
    "vllm.model_executor.model_loader.reload.layerwise": {
        "initialize_online_processing": WAITING.append,
        "get_layerwise_info": lambda layer: getattr(layer, "loading", Loading()),
    },
    "vllm.model_executor.parameter": {
        "ModelWeightParameter": ModelWeightParameter,
        "permute_param_layout_": permute_param_layout_,
    },
    "vllm.model_executor.kernels": {},
    "vllm.model_executor.kernels.linear": {"register_linear_kernel": register_linear_kernel},
    "vllm.model_executor.kernels.linear.mixed_precision": {},
    "vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel": {
        "MPLinearKernel": MPLinearKernel
    },
    "vllm.model_executor.kernels.linear.scaled_mm": {},
    "vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel": {
        "Int8ScaledMMLinearKernel": Int8ScaledMMLinearKernel
    },
    "vllm.platforms": {"current_platform": SimpleNamespace(device_type="cpu")},
    "vllm.platforms.interface": {"PlatformEnum": SimpleNamespace(CPU=CPU)},
    "vllm.scalar_type": {"scalar_types": SimpleNamespace(uint4b8="uint4b8", uint4="uint4")},
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
            if name in _CONTENTS or name in WITH_VLLM:
                del sys.modules[name]
        CONFIGS.clear()
        CURRENT.clear()
        KERNELS.clear()
        WAITING.clear()
        fake_attention.BACKENDS.clear()
