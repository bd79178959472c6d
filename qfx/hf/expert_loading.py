"""Quantizes blocks of experts one expert after the other, while transformers reads their weights.

A checkpoint may have the weights of each expert apart. transformers stacks those of a block, and so
makes float copies of all of them. Here its operations run for one expert at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    Transpose,
    WeightConverter,
)

from qfx.files.expert_blocks import put_together
from qfx.host.conversions import with_operations
from qfx.host.gpu_build import has_kernel
from qfx.host.tensors import is_distributed
from qfx.nn.experts import Experts
from qfx.nn.experts_like import FloatProduct, is_experts, products_of
from qfx.nn.experts_recipe import ExpertsHow
from qfx.nn.stacked_weight import StackedWeight
from qfx.nn.weight_faults import unquantizable, unserved_weight
from qfx.values.site_recipe import SiteRecipe
from qfx.weights.offload import drop_file_pages

_INNER = {1, 2, -1, -2}  # dimensions of [E, N, K] other than that of the experts
Parts = dict[str, list[Tensor]]  # the tensors of a checkpoint, by the pattern of their names


class Weights:
    """The float weights of all experts of one product, as they were read: tensors that map the
    file, unless transformers has changed their dtype.

    `each`: for each expert its parts, of which `make` makes the weight as the parameter has it.
    `whole`: makes the parameter of the product.
    """

    def __init__(
        self, each: Sequence[Any], make: Callable[[Any], Tensor], whole: Callable[[], Tensor]
    ) -> None:
        self.each, self.make, self.whole = each, make, whole

    @classmethod
    def of(cls, value: Any) -> Weights:
        """Returns `value` itself, or the weights of a parameter that transformers has stacked."""
        tensor = value[0] if isinstance(value, list) else value
        if isinstance(tensor, Weights):
            return tensor
        each = [{"": [one]} for one in tensor] if tensor.ndim else []
        return cls(each, lambda parts: parts[""][0], lambda: tensor)

    def __iter__(self) -> Iterator[Tensor]:
        for parts in self.each:
            yield self.make(parts)
            for tensor in _tensors(parts):
                drop_file_pages(tensor)

    def fault(self, shape: Sequence[int]) -> str:
        """Returns why these weights cannot be those of a product of this shape, or cannot be
        quantized; '' if they can. Reads their values."""
        if len(self.each) != shape[0] or self.make(self.each[0]).shape != tuple(shape[1:]):
            return f"the weights that were read are not {list(shape)}"
        for parts in self.each:
            for tensor in _tensors(parts):
                if why := unserved_weight(tensor) or unquantizable(tensor):
                    return why
                if not has_kernel("experts", tensor.device):
                    return f"its weights are on {tensor.device}, where experts have no kernel"
        return ""


def _tensors(parts: Parts) -> Iterator[Tensor]:
    return (tensor for tensors in parts.values() for tensor in tensors)


class ByExpert(ConversionOps):  # type: ignore[misc]
    """Operations of transformers that stack the weights of experts. Where `wanted` they are kept
    for each expert, to run later; elsewhere they run at once."""

    def __init__(self, operations: Sequence[Any], wanted: Callable[[Any, str], bool]) -> None:
        self.operations, self.wanted = operations, wanted

    def __deepcopy__(self, memo: Any) -> ByExpert:
        return self  # of each parameter that transformers loads by it

    def convert(
        self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any
    ) -> dict[str, Any]:
        given = dict(source_patterns=source_patterns, target_patterns=target_patterns, **kwargs)

        def run(parts: Parts) -> Any:
            found: Any = {name: [*tensors] for name, tensors in parts.items()}
            for operation in self.operations:
                found = operation.convert(found, **given)
            return found

        def tensor(parts: Parts) -> Tensor:
            found = run(parts)[target_patterns[0]]
            made: Tensor = found[0] if isinstance(found, list) else found
            return made

        counts = {len(tensors) for tensors in input_dict.values()}
        wanted = self.wanted(kwargs["model"], kwargs["full_layer_name"])
        if not wanted or len(counts) != 1 or len(target_patterns) != 1:
            return run(input_dict)  # type: ignore[no-any-return]
        parts = {name: [*tensors] for name, tensors in input_dict.items()}
        each = [{name: [ts[e]] for name, ts in parts.items()} for e in range(*counts)]
        made = Weights(each, lambda one: tensor(one)[0], lambda: tensor(parts))
        return {target_patterns[0]: made}

    @property
    def reverse_op(self) -> Any:
        raise AssertionError("`without` removes it before a model is saved")


def by_expert(conversions: Sequence[Any], wanted: Callable[[Any, str], bool]) -> list[Any]:
    """Returns the conversions of a model in which those that stack experts do so by `ByExpert`.
    `wanted`: whether a parameter of a model is to be quantized."""
    return [
        with_operations(each, [ByExpert(each.operations, wanted)]) if _stacks(each) else each
        for each in conversions
    ]


def without(conversions: Sequence[Any]) -> list[Any]:
    """Returns the conversions that `by_expert` was given."""
    found = []
    for each in conversions:
        first: Any = each.operations[0] if isinstance(each, WeightConverter) else None
        by = isinstance(first, ByExpert)
        found.append(with_operations(each, first.operations) if by else each)
    return found


def _stacks(conversion: Any) -> bool:
    """Whether a conversion stacks the weights of experts, and leaves that dimension alone then."""
    if not isinstance(conversion, WeightConverter):
        return False
    first, *rest = conversion.operations
    stacked = type(first) is MergeModulelist and first.dim == 0
    return stacked and all(_dimensions(operation) <= _INNER for operation in rest)


def _dimensions(operation: Any) -> set[int]:
    if type(operation) is Concatenate:
        return {operation.dim}
    return {operation.dim0, operation.dim1} if type(operation) is Transpose else {0}


@dataclass
class _Block:
    module: nn.Module
    how: ExpertsHow
    products: Mapping[str, FloatProduct]  # by the names of their parameters in the module
    read: dict[str, Weights]  # of the products that are read, by the same names


class ExpertLoading:
    """The blocks of experts that are quantized while a model is loaded.

    Both products of a block are held until both are read, and then quantized. So a block that
    cannot be quantized stays float as a whole.
    """

    def __init__(self, hows: Mapping[nn.Module, Any]) -> None:
        self.blocks = {
            module: _Block(module, how, {p.name: p for p in products_of(module)}, {})
            for module, how in hows.items()
            if is_experts(module)
        }

    def takes(self, module: nn.Module, name: str) -> bool:
        """Whether the parameter `name` of a module is a product of a block."""
        return module in self.blocks and name in self.blocks[module].products

    def read(self, module: nn.Module, name: str, weights: Weights) -> Experts | str | None:
        """Takes the weights of one product. Returns the int8 experts when the block is complete,
        or why it stays float, or None if it is not complete."""
        block = self.blocks[module]
        block.read[name] = weights
        if why := weights.fault(block.products[name].parameter.shape):
            return why
        if len(block.read) < len(block.products):
            return None
        up, down = (_quantized(block, product) for product in block.products.values())
        return put_together(module, up, down)

    def floats(self, module: nn.Module) -> dict[str, Tensor]:
        """Returns the parameters of a block that were read and are not quantized, by name, and
        forgets them."""
        read, self.blocks[module].read = self.blocks[module].read, {}
        return {name: weights.whole() for name, weights in read.items()}

    def leave(self, module: nn.Module) -> None:
        """Loads a block as transformers does from now on."""
        del self.blocks[module]


def _quantized(block: _Block, product: FloatProduct) -> StackedWeight:
    weights = block.read.pop(product.name)
    shape = product.weights.shape
    how = dict(zip(block.products, block.how, strict=True))[product.name]
    if isinstance(how, SiteRecipe) and how.rounding is not None:  # codes are of all experts
        whole = weights.whole()
        return StackedWeight.from_float(whole.mT if product.is_transposed else whole, how)
    scheme = how.scheme if isinstance(how, SiteRecipe) else how
    assert scheme is not None
    each = (weight.t() if product.is_transposed else weight for weight in weights)
    return StackedWeight.from_each(each, tuple(shape), scheme)


def is_shared_out(module: nn.Module) -> bool:
    """Whether a tensor-parallel plan has given this rank a part of the module's weights."""
    return any(is_distributed(parameter) for parameter in module.parameters(recurse=False))


def with_biases(made: Experts, block: nn.Module) -> Experts:
    """Gives int8 experts the biases of the float block that they replace."""
    for weight, product in zip((made.up, made.down), products_of(block), strict=True):
        weight.bias = product.bias
    return made


def put_floats(block: nn.Module, floats: Mapping[str, Tensor]) -> None:
    """Sets parameters of a block that stays float until everything is read."""
    for name, tensor in floats.items():
        setattr(block, name, nn.Parameter(tensor, requires_grad=torch.is_floating_point(tensor)))
