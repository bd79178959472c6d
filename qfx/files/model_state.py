"""Collects the tensors of a model that are stored: its state dict, each tensor once, and buffers
that are not in the state dict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from qfx.files.tensor_file import NAMES
from qfx.host.distributed import is_sharded
from qfx.host.tensors import has_values, wraps_tensors
from qfx.io.errors import UserError
from qfx.nn.experts import Experts
from qfx.nn.loading import Checked, StoredModule
from qfx.nn.stored_modules import Stored, stored_weights
from qfx.weights.change_detection import place_of

# Compute buffers that are in no file, for models on the meta device; qfx.hf adds that of
# transformers.
MAKERS: list[Callable[[nn.Module], dict[str, Tensor]]] = []


class ModelState(NamedTuple):
    """The tensors of a model that are stored.

    `tensors`: by name. `same`: other name of a tensor -> its name in `tensors`. `derived`: names of
    buffers outside the state dict. `linears`: the modules without float weights, by all of their
    names. Experts have two: `up` and `down`.
    """

    tensors: dict[str, Tensor]
    same: dict[str, str]
    derived: tuple[str, ...]
    linears: dict[str, Stored]


def state_of(model: nn.Module) -> ModelState:
    """Returns the tensors of a model that are stored. Raises ValueError for values that files
    cannot store. The codes of int8 weights are copies, all other tensors are not."""
    if not any(isinstance(module, Checked) for module in model.modules()):
        raise UserError(
            "save: the model has no module of qfx in it, so that nothing of it would be int8: "
            "qfx.quantize_(model) first. A compiled model keeps its float weights"
        )
    if isinstance(model, Stored | Experts):
        what = "linear" if isinstance(model, StoredModule) else "block of experts"
        raise UserError(f"save: the model is a single {what}: put it into a module")
    if any(map(is_sharded, model.modules())):
        raise UserError("save: FSDP shards the model: gather its state dict first")
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(value) or value.is_nested:  # state_dict() would fail
            raise UserError(f"save: {name} {_unstorable(value)}")
    state = model.state_dict()
    derived = derived_buffers(model, state)
    everything = {**state, **derived}
    for name, value in everything.items():
        if why := _unstorable(value):
            raise UserError(f"save: {name} {why}")
    same = ties(model, everything)
    tensors = {name: value for name, value in everything.items() if name not in same}
    return ModelState(tensors, same, tuple(derived), dict(stored_weights(model)))


def derived_buffers(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the buffers that the model's state dict leaves out, such as tables of positions and
    masks, by name. They are stored, because a model on the meta device cannot compute them."""
    made = {f"{name}.{own}" for name, m in stored_weights(model) for own in m.UNSAVED}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return {n: b for n, b in buffers.items() if n not in state and n not in made}


def buffers_of(skeleton: nn.Module) -> dict[str, Tensor]:
    """Returns values, by name, for buffers of `skeleton` that are on the meta device and that
    `MAKERS` can compute."""
    return {name: tensor for make in MAKERS for name, tensor in make(skeleton).items()}


def _unstorable(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"is of type {type(value).__name__}, which a file of tensors cannot hold"
    if is_lazy(value):
        return "has no shape yet: run the model once, which gives its lazy modules their weights"
    if value.is_nested:
        return "is a nested tensor, which files do not hold"
    if wraps_tensors(value):
        return f"is a {type(value).__name__}, a tensor subclass: gather or convert it first"
    if not has_values(value):
        return "is on the meta device, where it has no values"
    if value.layout != torch.strided:
        return f"is {value.layout}: make it dense first"
    return "" if value.dtype in NAMES else f"is {value.dtype}, which files do not hold"


def ties(model: nn.Module, tensors: Mapping[str, Any]) -> dict[str, str]:
    """Returns, for each tensor that `tensors` contains under several names: later name -> first
    name."""
    first: dict[Any, str] = {}
    parts = _parts_of_shared(model)
    same = {}
    for name, value in tensors.items():
        if isinstance(value, Tensor):
            key = parts.get(name) or place_of(value)
            if first.setdefault(key, name) != name:
                same[name] = first[key]
    return same


def _parts_of_shared(model: nn.Module) -> dict[str, tuple[int, str]]:
    """Returns, for each stored tensor of a linear, the id of the linear and the tensor's name in
    it. The tensors are created anew at each request, so their addresses do not show which names
    belong to the same linear."""
    linears = stored_weights(model)
    return {f"{name}.{part}": (id(m), part) for name, m in linears for part in m.PARTS}
