"""Counts the bytes of a model's weights: the quantized weights in all, and the float weights by
class of module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from qfx.host.tensors import is_distributed, storage_id
from qfx.nn.loading import StoredModule
from qfx.nn.qat_state import TrainedState
from qfx.nn.quantized_weight import QuantizedWeight
from qfx.nn.stacked_weight import StackedWeight

_SHOWN = 4  # kinds of modules in a sentence
_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True)
class WeightBytes:
    """The bytes that the weights of a model take in float, counted separately for weights that are
    quantized and for weights that stay float. A storage that tensors share is counted once.

    `quantized`: the bytes that the quantized weights of matmuls took in float. `floating`: the
    bytes that stay float, by class of module. `multiplying`: the part of `floating` that belongs to
    matrices, kernels of convolutions and weights of experts. It does not include embeddings, which
    are looked up, unless a float linear has the same weight; nor vectors and terms that are added
    to one sequence ([1, ...]).

    `item`: the bytes of an element, in the dtype that most of the weights have. `looked_up`: the
    bytes that int8 embeddings took in float; not part of `quantized`.
    """

    quantized: int
    floating: Mapping[str, int]
    multiplying: Mapping[str, int]
    item: int = 4
    looked_up: int = 0

    @property
    def total(self) -> int:
        """The bytes of all weights that multiply."""
        return self.quantized + sum(self.multiplying.values())

    @property
    def share(self) -> float:
        """The quantized part of the weights that multiply, 0 to 1; 1 if there are none."""
        return self.quantized / self.total if self.total else 1.0

    @property
    def mostly_float(self) -> str:
        """A warning if less than half of the weights that multiply are quantized, otherwise ''."""
        if self.share >= 0.5:
            return ""
        many = "less than half" if self.quantized else "none"
        return (
            f"{many} of the weights that multiply is quantized, {size(self.quantized)} of "
            f"{size(self.total)} ({self.share:.1%}); float: {kinds(self.multiplying)}"
        )

    def __str__(self) -> str:
        int8 = self.quantized + self.looked_up
        whole = int8 + sum(self.floating.values())
        share = f"{int8 / whole:.1%}" if whole else "0.0%"
        float_ = f"; float: {kinds(self.floating)}" if self.floating else ""
        return f"{size(int8)} of {size(whole)} of weights quantized ({share}){float_}"


def weight_bytes(model: nn.Module, int8: Collection[str] = ()) -> WeightBytes:
    """Counts the bytes of the weights of `model`. Modules that have no shape yet (lazy modules) are
    left out.

    `int8`: the names of float parameters that count as quantized, because a compiled graph
    quantizes them.
    """
    tensors: dict[object, tuple[str, int, bool]] = {}
    chosen: set[object] = set()
    types: Counter[int] = Counter()
    codes = looked_up = 0
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in _own(module):
            key = _key(tensor)
            if (f"{path}.{name}" if path else name) in int8:
                chosen.add(key)
            multiplies = _multiplies(module, tensor)
            if key not in tensors or (multiplies and not tensors[key][2]):
                tensors[key] = (type(module).__name__, _bytes(tensor), multiplies)
                types[tensor.element_size()] += tensor.numel()
    item = types.most_common(1)[0][0] if types else 4
    for module in model.modules():
        if isinstance(module, TrainedState) or _has_codes(module):
            count = _float_numel(module) * item
            looked_up += count if isinstance(module, nn.Embedding) else 0
            codes += 0 if isinstance(module, nn.Embedding) else count
        elif isinstance(module, StackedWeight):
            codes += module.experts * module.n * module.k * item
    floating: Counter[str] = Counter()
    multiplying: Counter[str] = Counter()
    for key, (kind, count, multiplies) in tensors.items():
        if key in chosen:
            codes += count
            continue
        floating[kind] += count
        if multiplies:
            multiplying[kind] += count
    return WeightBytes(codes, dict(floating), dict(multiplying), item, looked_up)


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the module's own float tensors with their names, without the weights that a quantized
    linear computes with."""
    own: list[tuple[str, Tensor]] = [*module.named_parameters(recurse=False)]
    if not isinstance(module, StoredModule):
        own += module.named_buffers(recurse=False)
    for name, tensor in own:
        if _is_codes(tensor):
            continue
        trained = isinstance(module, TrainedState) and name == "weight"
        if not is_lazy(tensor) and tensor.is_floating_point() and not trained:
            yield name, tensor


def _has_codes(module: nn.Module) -> bool:
    """Whether `module` is an int8 module, possibly one whose weight is split across ranks."""
    if not isinstance(module, StoredModule):
        return False
    return module.is_quantized or _is_codes(module._parameters.get("weight"))


def _float_numel(module: Any) -> int:
    """Returns the number of elements of the weight of a quantized module in float."""
    stored = isinstance(module, StoredModule)
    return module.float_numel if stored else int(module.in_features) * int(module.out_features)


def _is_codes(tensor: Any) -> bool:
    local = tensor.to_local() if is_distributed(tensor) else tensor
    return isinstance(local, QuantizedWeight)


def _multiplies(module: nn.Module, tensor: Tensor) -> bool:
    is_matrix = isinstance(tensor, nn.Parameter) and tensor.ndim >= 2
    is_matrix = is_matrix and (tensor.is_nested or tensor.shape[0] > 1)
    return is_matrix and not isinstance(module, (*_LOOKUPS, TrainedState))


def _key(tensor: Tensor) -> object:
    storage = storage_id(tensor)
    apart = storage is None or tensor.is_nested
    return id(tensor) if apart else (storage, tensor.storage_offset(), tensor.numel())


def _bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor; for an expanded tensor, at most those of its storage."""
    count = tensor.numel() * tensor.element_size()
    if tensor.is_nested or tensor.layout != torch.strided or 0 not in tensor.stride():
        return count
    return min(count, tensor.untyped_storage().nbytes())


def kinds(by_kind: Mapping[str, int]) -> str:
    """Formats bytes by class of module: the largest classes with their bytes, and the total of the
    others."""
    largest = sorted(by_kind.items(), key=lambda item: (-item[1], item[0]))
    parts = [f"{kind} {size(count)}" for kind, count in largest[:_SHOWN]]
    if rest := largest[_SHOWN:]:
        parts.append(f"{len(rest)} other kinds {size(sum(count for _, count in rest))}")
    return ", ".join(parts)


def size(count: int) -> str:
    """Formats bytes as kB below 1 MB, otherwise as MB."""
    return f"{count / 1e3:,.1f} kB" if count < 1e6 else f"{count / 1e6:,.2f} MB"
