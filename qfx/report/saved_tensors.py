"""The tensors that autograd saves in a forward pass: what a training step keeps until its backward
pass, beside weights, gradients and the states of the optimizer."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from qfx.host.autograd import saved_by, short_name
from qfx.host.frame import running_modules
from qfx.host.tensors import WeakStorage, storage_id, weak_storage
from qfx.report.whole_model import floating
from qfx.weights.model_restore import unchanged


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that autograd saved. `module`: the path of the innermost module that ran, and `kind`
    its class. `operator`: whose gradient needs the tensor. `bytes`: of its storage, which several
    tensors may share: it is counted once, for the first that was saved."""

    module: str
    kind: str
    operator: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class SavedReport:
    """The tensors that a forward pass saved, in its order; prints as a table by class of module and
    operator. Tensors that existed before, such as parameters, packed weights and inputs, are left
    out."""

    rows: tuple[SavedTensor, ...]

    @property
    def bytes(self) -> int:
        """The bytes of all saved tensors together."""
        return sum(row.bytes for row in self.rows)

    def __str__(self) -> str:
        sizes, counts = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
        for row in self.rows:
            key = row.kind, row.operator, str(row.dtype).removeprefix("torch.")
            sizes[key] += row.bytes
            counts[key] += 1
        lines = [(*key, counts[key], f"{size / 1e6:.2f}") for key, size in sizes.most_common()]
        table = tabulate(lines, headers=("module", "operator", "dtype", "tensors", "MB"))
        return f"{table}\n{self.bytes / 1e6:.2f} MB saved for the backward pass"


def saved_tensors(model: Callable[..., Any], *inputs: Any, **keyword_inputs: Any) -> SavedReport:
    """Runs `model(*inputs, **keyword_inputs)` once with gradients, and returns the tensors that
    autograd saved for the backward pass.

    A tensor is counted if the output needs it, so that what an operator saved and nobody asks for
    is not. In a compiled model the operator is `CompiledFunction`. The model runs in the mode that
    it is in; its parameters, buffers and the default random generators are as before afterwards.
    Raises ValueError if no output requires gradients.
    """
    names = dict[int, str]()
    if isinstance(model, nn.Module):
        names = {id(module): name for name, module in model.named_modules()}
    before, kept = _storages(), list[tuple[Tensor, nn.Module | None]]()

    def pack(tensor: Tensor) -> int:
        running = [module for module in running_modules() if id(module) in names]
        kept.append((tensor, running[-1] if running else None))
        return len(kept) - 1

    asked = list[int]()

    def unpack(index: int) -> Tensor:
        asked.append(index)
        return kept[index][0]

    with unchanged(model, "saved_tensors"), torch.enable_grad():
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            output = model(*inputs, **keyword_inputs)
        ends = [tensor.grad_fn for tensor in floating(output) if tensor.grad_fn is not None]
        if not ends:
            raise ValueError("saved_tensors: no output of the model requires gradients")
        operators = _operators(ends, asked)
    rows = []
    for index in sorted(operators):
        tensor, module = kept[index]
        storage = storage_id(tensor)
        if storage in before:
            continue
        if storage is not None:
            before[storage] = weak_storage(tensor)
        name, kind = ("", "") if module is None else (names[id(module)], type(module).__name__)
        size = tensor.nbytes if storage is None else tensor.untyped_storage().nbytes()
        rows.append(
            SavedTensor(name, kind, operators[index], tensor.dtype, tuple(tensor.shape), size)
        )
    return SavedReport(tuple(rows))


def _storages() -> dict[int | None, WeakStorage]:
    """Returns the storages of all tensors of the process. As long as the references exist, no other
    storage gets the number of one that is freed."""
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    known = {storage_id(tensor): tensor for tensor in tensors}
    return {key: weak_storage(tensor) for key, tensor in known.items() if key is not None}


def _operators(ends: list[Any], asked: list[int]) -> dict[int, str]:
    """Returns, for each saved tensor on the way from these nodes back to the leaves, the operator
    that saved it. Reading what a node saved appends the tensors' numbers to `asked`."""
    found: dict[int, str] = {}
    for node in _nodes(ends):
        asked.clear()
        saved_by(node)
        for index in asked:
            found.setdefault(index, short_name(node))
    return found


def _nodes(ends: list[Any]) -> Iterator[Any]:
    todo, seen = [*ends], set[Any]()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        todo += [following for following, _ in node.next_functions]
