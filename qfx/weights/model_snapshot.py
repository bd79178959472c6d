"""ModelSnapshot: saves the tensors and attributes of a model's modules, to restore them.

It restores the attributes of each module, including the contents of lists, dicts and sets among
them (the registries of parameters, buffers and submodules are such dicts), the values of buffers,
and the values of parameters for which `keep` was called. The contents of other objects are not
restored. Lazy modules stay as their first call made them. If FSDP shards a model, its attributes
and parameters are not restored.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from qfx.host.distributed import is_sharded
from qfx.host.tensors import version

_CONTAINERS = (list, dict, OrderedDict, set, deque)


class ModelSnapshot:
    """A snapshot of a module, or, for None, only of tensors for which `keep` is called. Needs
    memory for a copy of the buffers."""

    def __init__(self, module: nn.Module | None) -> None:
        every = [] if module is None else [*module.modules()]
        parts = [part for part in every if not any(map(is_lazy, _tensors(part)))]
        sharded = any(map(is_sharded, parts))
        self.attributes = [] if sharded else [_Attributes(vars(part)) for part in parts]
        named = () if module is None or sharded else module.named_parameters()
        self.parameters = [(n, p, p.data, version(p)) for n, p in named if not is_lazy(p)]
        self.values: dict[int, _Value] = {}
        self.written: list[str] = []  # parameters that `restore` found changed
        for part in parts:
            read_only = getattr(part, "READ_ONLY", ())  # a quantized weight is large
            for name, buffer in part.named_buffers(recurse=False):
                if name not in read_only:
                    self.keep(buffer)

    def keep(self, tensor: Tensor) -> None:
        """Saves the values of a tensor, at the first call for it."""
        if id(tensor) not in self.values:
            self.values[id(tensor)] = _Value(tensor, tensor.data, tensor.detach().clone())

    def restore(self) -> list[str]:
        """Restores everything. Returns the names of parameters that were written and keep the new
        values."""
        self.written = [
            name
            for name, parameter, _, before in self.parameters
            if version(parameter) != before and id(parameter) not in self.values
        ]
        for attributes in self.attributes:
            attributes.put_back()
        for _, parameter, memory, _ in self.parameters:
            _put_memory_back(parameter, memory)
        for value in self.values.values():
            value.put_back()
        return self.written


class _Attributes:
    """A dict, and the containers among its values, with their contents."""

    def __init__(self, of: dict[str, Any]) -> None:
        inner = [value for value in of.values() if type(value) in _CONTAINERS]
        self.containers = [(container, container.copy()) for container in (of, *inner)]

    def put_back(self) -> None:
        for container, before in self.containers:
            if [*map(id, _elements(container))] != [*map(id, _elements(before))]:
                container.clear()
                (container.extend if hasattr(container, "extend") else container.update)(before)


def _elements(container: Any) -> Iterator[Any]:
    yield from container
    if isinstance(container, dict):
        yield from container.values()


class _Value(NamedTuple):
    """A tensor, the memory of its values, and a copy of them."""

    tensor: Tensor
    memory: Tensor
    copy: Tensor

    def put_back(self) -> None:
        with torch.inference_mode(self.tensor.is_inference()), torch.no_grad():
            _put_memory_back(self.tensor, self.memory)
            if not _same_bits(self.tensor, self.copy):
                self.tensor.copy_(self.copy)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _put_memory_back(tensor: Tensor, memory: Tensor) -> None:
    """Undoes `tensor.data = ...`."""
    place = [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in (tensor, memory) if _is_plain(t)]
    if len(place) == 2 and place[0] != place[1]:
        tensor.data = memory


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bits; False if that cannot be determined."""
    if not _is_plain(a):
        return False
    as_bytes = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(*as_bytes)


def _is_plain(tensor: Tensor) -> bool:
    dense = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)
    return dense and not tensor.is_meta and type(tensor) in (Tensor, nn.Parameter)
