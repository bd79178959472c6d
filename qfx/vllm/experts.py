"""Experts of vLLM with quantized weights: all products of a block, in one operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase
from vllm.model_executor.utils import replace_parameter

from qfx.nn.experts_like import why_no_experts_scheme
from qfx.nn.stacked_weight import StackedWeight
from qfx.nn.weight_faults import too_long, unquantizable
from qfx.ops.expert_gates import ExpertGate
from qfx.values.scheme import Scheme
from qfx.vllm.counting import Counts
from qfx.vllm.linears import DONE, check_read

GATES = {  # by the name that vLLM has for what lies between both products
    "silu": ExpertGate("silu", "halves"),
    "gelu": ExpertGate("gelu", "halves"),
    "gelu_tanh": ExpertGate("gelu_tanh", "halves"),
    "silu_no_mul": ExpertGate("silu", "none"),
    "gelu_no_mul": ExpertGate("gelu", "none"),
    "gelu_tanh_no_mul": ExpertGate("gelu_tanh", "none"),
}


def why_float_experts(layer: Any, scheme: Scheme) -> str:
    """Returns why the experts of this layer of vLLM stay float; '' if they become int8. A class
    derived from vLLM's, as that of GPT-OSS, may write weights past vLLM's loaders."""
    if type(layer) is not RoutedExperts:
        return f"{type(layer).__name__} loads its weights in a way of its own"
    name = layer.activation.value
    limits = layer.swiglu_limit, layer.swiglu_alpha, layer.swiglu_beta
    if name not in GATES or any(value is not None for value in limits):
        return f"their activation {name} is not one of the operator"
    return why_no_experts_scheme(scheme)


class ExpertsMethod(OnlineMoEMethodBase):  # type: ignore[misc]  # untyped without vLLM
    """Stores both weights of each expert of a block packed, and runs a block by `qfx::experts`.

    The float weights [E, N, K] are created without memory; vLLM gives them some when those of all
    experts of the block have been read, and this method packs them at once, one expert after the
    other. A block with NaN or infinity in a weight stays float, with a warning.
    """

    supports_eplb = False  # no expert moves to another rank

    def __init__(self, scheme: Scheme, name: str, moe: Any, counts: Counts) -> None:
        super().__init__(moe)
        self.scheme, self.name, self.counts = scheme, name, counts
        self.products: tuple[StackedWeight, ...] = ()  # without weights, which the layer has

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        """Returns None: the method has no kernel of vLLM, which would read one."""

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, DONE, False):
            return
        check_read(layer, self.name)
        floats = {name: getattr(layer, name).detach() for name in ("w13_weight", "w2_weight")}
        if why := next(filter(None, map(_fault, floats.values())), ""):
            self._leave_float(layer, why)
        else:
            self.products = tuple(_packed(layer, *each, self.scheme) for each in floats.items())
            self.counts.packed(self.name, sum(w.numel() for w in floats.values()))
        setattr(layer, DONE, True)

    def _leave_float(self, layer: Any, why: str) -> None:
        self.counts.unpacked(self.name, why)
        method = UnquantizedFusedMoEMethod(self.moe)
        method.process_weights_after_loading(layer)
        layer.quant_method = method

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        up, down = self.products
        slots = topk_ids.to(torch.int64)
        if layer.expert_map is not None:  # -1 for the experts of other ranks, which add nothing
            local = layer.expert_map.to(torch.int64)[slots]
            slots = torch.where(local < 0, layer.local_num_experts, local)
        if layer.apply_router_weight_on_input:
            x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
        gate = GATES[layer.activation.value]
        both = layer.w13_weight, up.layout, _bias(layer, "w13"), layer.w2_weight, down.layout
        end = gate.activation, gate.gate, x.dtype, gate.limit, gate.shift
        y: Tensor = torch.ops.qfx.experts(
            x, slots, topk_weights, *both, _bias(layer, "w2"), up.code, down.code, *end
        )
        return y


def _fault(weights: Tensor) -> str:
    return too_long(weights[0]) or unquantizable(weights.flatten(0, 1))


def _packed(layer: nn.Module, name: str, floats: Tensor, scheme: Scheme) -> StackedWeight:
    """Replaces the weights [E, N, K] of this name by packed ones, and returns what describes
    them."""
    made = StackedWeight.from_float(floats, scheme)
    replace_parameter(layer, name, made.packed)
    made.packed = made.packed.new_empty(0, device="meta")
    return made


def _bias(layer: nn.Module, product: str) -> Tensor | None:
    return getattr(layer, f"{product}_bias", None)
