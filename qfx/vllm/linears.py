"""Linears of vLLM with quantized weights: plain, merged, divided among ranks, and the head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.model_loader.reload.layerwise import (
    get_layerwise_info,
    initialize_online_processing,
)
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.model_executor.utils import replace_parameter

from qfx.io.errors import UserError
from qfx.nn.frozen import Frozen, Prepared, freeze, linear, prepared
from qfx.nn.weight_faults import too_long, unquantizable
from qfx.values.scheme import Scheme
from qfx.vllm.counting import Counts

DONE = "_already_called_process_weights_after_loading"  # vLLM removes it before it loads again


def check_read(layer: nn.Module, name: str) -> None:
    """Raises UserError if no file had a weight for this layer, or the model wrote it past vLLM's
    loaders: the layer then has memory that nobody wrote, which vLLM would pack."""
    info, config = get_layerwise_info(layer), get_current_vllm_config_or_none()
    random = config is not None and config.load_config.load_format == "dummy"
    if info.can_load() and not info.load_numel and not random:
        raise UserError(
            f"qfx in vLLM: no weight was loaded for {name}: it is in no file of the model, or the "
            f"model loads it in a way of its own; in that case leave it float, skip=[{name!r}]"
        )


class LinearMethod(LinearMethodBase):  # type: ignore[misc]  # untyped without vLLM
    """Stores the weight of one linear packed, and multiplies by it.

    The float weight is created without memory; vLLM gives it some when all its parts have been
    read, and this method packs it at once. Of several linears in one (`qkv_proj`), the activations
    are quantized once.
    """

    uses_meta_device = True

    def __init__(self, scheme: Scheme, name: str, counts: Counts) -> None:
        self.scheme, self.name, self.counts = scheme, name, counts
        self.how: Prepared | None = None  # None while the weight is float

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        n, k = sum(output_partition_sizes), input_size_per_partition
        weight = ModelWeightParameter(
            data=torch.empty(n, k, dtype=params_dtype, device="meta"),
            input_dim=1,
            output_dim=0,
            weight_loader=attributes.get("weight_loader"),
        )
        layer.register_parameter("weight", weight)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if getattr(layer, DONE, False):
            return
        check_read(layer, self.name)
        self.pack(layer, layer.weight.detach())  # type: ignore[operator,union-attr]
        setattr(layer, DONE, True)

    def pack(self, layer: nn.Module, weight: Tensor) -> None:
        """Replaces the weight of the layer by `weight` [N, K], packed."""
        if why := too_long(weight) or unquantizable(weight):
            self.how = None
            self.counts.unpacked(self.name, why)
            return
        scheme, frozen = freeze(weight, self.scheme)
        self.how = prepared(scheme, weight.shape[0])
        replace_parameter(layer, "weight", frozen.packed)
        self.counts.packed(self.name, weight.numel())

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.how is None:
            return nn.functional.linear(x, layer.weight, bias)  # type: ignore[arg-type]
        return linear(x, bias, self.frozen(layer), self.how)

    def frozen(self, layer: nn.Module) -> Frozen:
        """Returns the tensors by which the layer computes."""
        return Frozen(layer.weight)  # type: ignore[arg-type]


class HeadMethod(LinearMethod):
    """The same for the head. Where its weight is that of the embedding, which stays float, a packed
    copy is made after loading."""

    def __init__(self, scheme: Scheme, name: str, counts: Counts) -> None:
        super().__init__(scheme, name, counts)
        self.embedding_layer: Any = None

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        self.embedding_layer = embed_tokens
        del layer._parameters["weight"]
        return layer

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if self.embedding_layer is None:
            super().process_weights_after_loading(layer)
        elif not getattr(layer, DONE, False):
            floats = self.embedding_layer.weight.detach()
            layer.register_parameter("weight", nn.Parameter(floats, requires_grad=False))
            self.pack(layer, floats)
            setattr(layer, DONE, True)
