"""Experts: a block of experts whose weights are int8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from qfx.host.autograd import below_autograd, in_forward_mode
from qfx.nn.experts_like import (
    FLOAT_NAMES,
    FloatProduct,
    experts_fault,
    gate_of,
    is_experts,
    products_of,
    why_not_experts,
)
from qfx.nn.experts_recipe import ExpertsHow, How, check_recipe, why_float, why_not_by_recipe
from qfx.nn.stacked_weight import StackedWeight
from qfx.ops.expert_gates import ExpertGate
from qfx.values.config import Config
from qfx.values.scheme import Scheme
from qfx.weights.offload import drop_file_pages


class Experts(nn.Module):
    """y = sum over slots of routing times an expert of x: the experts of a mixture, each of two
    linears with a gate or an activation between them, with weights that are int8 codes and do not
    train. (X2)

        model.mlp.experts = qfx.nn.Experts.from_float(model.mlp.experts, "w8a8")

    It replaces such a module of transformers. `up` and `down` are its two products
    (`StackedWeight`), each expert quantized like the weight of a `qfx.nn.Linear`. Outputs equal
    those of the experts one by one, bit for bit, whatever other tokens there are.
    """

    def __init__(self, up: StackedWeight, down: StackedWeight, gate: ExpertGate) -> None:
        super().__init__()
        self.up, self.down, self.gate = up, down, gate

    @classmethod
    def from_float(
        cls, module: nn.Module, scheme: Scheme | str | ExpertsHow | None = None, free: bool = False
    ) -> Experts:
        """Quantizes the experts of `module`, one after the other, and uses the same biases.

        `scheme`: `qfx.Scheme()` by default, or the name of a preset, or, for each of the two
        products, a scheme or a `SiteRecipe`, which may have codes. `free`: leaves in `module` no
        float weights of a product that is quantized, but tensors on the meta device, before the
        next is quantized. Raises ValueError, with the reason, for a module or a scheme that cannot
        be taken.
        """
        chosen = Config(scheme=scheme).chosen if isinstance(scheme, str) else scheme or Scheme()
        how = ExpertsHow(chosen, chosen) if isinstance(chosen, Scheme) else ExpertsHow(*chosen)
        if not is_experts(module):
            raise ValueError(f"Experts: {type(module).__name__} has no float weights of experts")
        reasons = why_not_experts(module), why_not_by_recipe(how), experts_fault(module)
        for why in filter(None, (*reasons, why_float(module, how))):
            raise ValueError(f"Experts: {why}")
        check_recipe(module, how)
        gate = gate_of(module)
        assert gate is not None
        both = zip(products_of(module), how, strict=True)
        up, down = (_quantized(product, each, free) for product, each in both)
        return cls(up, down, gate).train(module.training)

    @property
    def num_experts(self) -> int:
        """The number of experts."""
        return self.up.experts

    @property
    def scheme(self) -> str:
        """The scheme of both products as a string, or the schemes if their rotations differ."""
        return " and ".join(dict.fromkeys(str(part.scheme) for part in (self.up, self.down)))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Maps tokens [T, K] to [T, N], in their dtype. `top_k_index` [T, S]: the expert of each
        slot; an expert from E on does not exist, and its slot adds nothing. `top_k_weights` [T, S]:
        what multiplies it. Gradients go to the tokens, `top_k_weights` and the biases (X4)."""
        given = (hidden_states, top_k_index, top_k_weights)
        if isinstance(hidden_states, fx.Proxy):
            return self._run(*given)
        needed = torch.is_grad_enabled() and any(t.requires_grad for t in (*given, *self._biases()))
        if needed or torch.compiler.is_compiling() or in_forward_mode():
            return self._run(*given)
        with below_autograd():
            return self._run(*given)

    def _run(self, x: Tensor, expert: Tensor, routing: Tensor) -> Tensor:
        up, down, gate = self.up, self.down, self.gate
        weights = (up.packed, up.layout, up.bias, down.packed, down.layout, down.bias)
        end = (gate.activation, gate.gate, x.dtype, gate.limit, gate.shift)
        index = expert.to(torch.int64)
        y: Tensor = torch.ops.qfx.experts(x, index, routing, *weights, up.code, down.code, *end)
        return y

    def _biases(self) -> list[Any]:
        return [part.bias for part in (self.up, self.down) if part.bias is not None]

    def __getattr__(self, name: str) -> Any:
        if name in FLOAT_NAMES:
            raise AttributeError(
                f"qfx.nn.Experts has no parameter {name}: its weights are int8 codes, "
                "up.dequantized(e) and down.dequantized(e) return those of an expert in float. An "
                "adapter of PEFT on it (target_parameters) needs float experts, "
                "qfx.Config(skip=['experts']), and may be merged before quantize_"
            )
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.gate._asdict().items())


def _quantized(product: FloatProduct, how: How, free: bool) -> StackedWeight:
    made = StackedWeight.from_float(product.weights, how, product.bias)
    drop_file_pages(product.parameter)
    if free:
        left = torch.empty_like(product.parameter, device="meta")
        product.module._parameters[product.name] = nn.Parameter(left, requires_grad=False)
    return made
