"""SavedExpertsMethod: int8 experts of a checkpoint that `save_pretrained` wrote, in vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.utils import replace_parameter

from qfx.io.errors import UserError, printable
from qfx.nn.experts_like import FloatProduct
from qfx.nn.scheme_tensor import KEY, read_any, scheme_of
from qfx.nn.stacked_weight import StackedWeight
from qfx.vllm.counting import Counts
from qfx.vllm.experts import ExpertsMethod, why_float_experts
from qfx.vllm.linears import DONE
from qfx.vllm.saved_tensors import WHO

PRODUCTS = {"up": "w13_weight", "down": "w2_weight"}  # saved names, and those of vLLM


class SavedExpertsMethod(ExpertsMethod):
    """Takes the saved tensors of both products of a block as they are read, and packs them when
    all have been. `schemes`: of `up` and `down`. `began` is called when a tensor is loaded.

    Raises UserError for experts that the operator does not compute, for tensors that do not fit
    this rank's block (experts of an int8 checkpoint are not divided), and for those in no file.
    """

    uses_meta_device = False

    def __init__(
        self,
        layer: Any,
        schemes: Sequence[Tensor],
        name: str,
        counts: Counts,
        began: Callable[[], None],
    ) -> None:
        found = [
            scheme_of(read_any(s, f"{name}.{p}"), name)
            for p, s in zip(PRODUCTS, schemes, strict=True)
        ]
        if why := next(filter(None, (why_float_experts(layer, scheme) for scheme in found)), ""):
            raise UserError(
                f"{WHO}: {name} are int8 in this checkpoint, but {why}: quantize with "
                "skip=['experts'] and save again"
            )
        super().__init__(found[0], name, layer.moe_config, counts)
        self.schemes, self.began = schemes, began
        self.state: dict[str, Tensor] = {}
        self.sizes: dict[str, tuple[int, int, int]] = {}

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        width, k = intermediate_size_per_partition, hidden_size
        rows = layer.moe_config.w13_num_shards * width
        self.sizes = {"up": (num_experts, rows, k), "down": (num_experts, k, width)}
        for name in PRODUCTS.values():
            empty = torch.empty(0, dtype=torch.int8, device="cpu")
            layer.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        layer.load_weights = self.take

    def take(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
        """Loads weights in the place of the layer's own `load_weights`, and yields the names of
        parameters that were. Marks in the place of float weights are left out."""
        for name, tensor in weights:
            product, _, part = name.partition(".")
            if product in PRODUCTS and "." not in part:
                self.began()
                self.state[name] = tensor
                yield PRODUCTS[product]

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, DONE, False):
            return
        made = [self._made(*given) for given in zip(PRODUCTS, self.schemes, strict=True)]
        for name, product in zip(PRODUCTS.values(), made, strict=True):
            replace_parameter(layer, name, product.packed)
            product.packed = product.packed.new_empty(0, device="meta")
        self.products, self.state = tuple(made), {}
        self.counts.packed(self.name, sum(e * n * k for e, n, k in self.sizes.values()))
        setattr(layer, DONE, True)

    def _made(self, product: str, scheme: Tensor) -> StackedWeight:
        name, (experts, n, k) = f"{self.name}.{product}", self.sizes[product]
        given = self.state.get(f"{product}.{KEY}")
        if given is not None and not torch.equal(given, scheme):
            raise UserError(
                f"{WHO}: {name} has another scheme in its file than in config.json: save the model "
                "again"
            )
        state = {f"{self.name}.{part}": tensor for part, tensor in self.state.items()}
        try:
            found = StackedWeight.taken_from(state, f"{name}.", experts, n, k)
        except ValueError as why:
            raise UserError(
                f"{WHO}: {printable(str(why))}. Ranks do not share the experts of an int8 "
                "checkpoint: with --tensor-parallel-size, serve the float one with "
                "--quantization qfx"
            ) from None
        if found is None:
            raise UserError(
                f"{WHO}: no file of the model has {name}, or the model loads it in a way of its "
                "own: quantize with skip=['experts'] and save again"
            )
        holder = nn.Module()
        floats = torch.empty(experts, n, k, dtype=torch.float32, device="meta")
        holder.register_parameter("weights", nn.Parameter(floats, requires_grad=False))
        return StackedWeight.from_state(FloatProduct(holder, "weights", None), found)
