"""Computes buffers that are not in the state dict, such as tables of positions, for a transformers
model on the meta device. The model itself computes them, as in from_pretrained."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qfx.files.model_state import derived_buffers


def made_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers outside the state dict, by name; floats in float32, whatever the dtype of
    the model is."""
    found: dict[str, Tensor] = {}
    for at, owner in model.named_modules():
        if isinstance(owner, PreTrainedModel):
            prefix = f"{at}." if at else ""
            found = {f"{prefix}{name}": t for name, t in _made(owner).items()} | found
    return found


def _made(owner: PreTrainedModel) -> dict[str, Tensor]:
    """Returns the buffers that the model computes. Buffers whose result depends on their previous
    values are left out."""
    derived = derived_buffers(owner, owner.state_dict())
    lacking = [name for name, buffer in derived.items() if buffer.is_meta]
    makers = {name.rpartition(".")[0] for name in lacking}
    makers = {at for at in makers if not owner.get_submodule(at)._parameters}
    lacking = [name for name in lacking if name.rpartition(".")[0] in makers]
    if not lacking:
        return {}
    parameters: dict[int, Any] = {id(parameter): parameter for parameter in owner.parameters()}
    own = copy.deepcopy(owner, parameters)  # shares the parameters, which are not written
    first, second = (_initialised(own, lacking, makers, filling) for filling in (0, 1))
    return {name: first[name] for name in lacking if torch.equal(first[name], second[name])}


def _initialised(
    own: PreTrainedModel, lacking: Sequence[str], makers: Collection[str], filling: int
) -> dict[str, Tensor]:
    for at, module in own.named_modules():
        module._is_hf_initialized = at not in makers  # type: ignore[assignment]
    for name in lacking:
        at, _, last = name.rpartition(".")
        buffer = own.get_buffer(name)
        dtype = torch.float32 if buffer.is_floating_point() else buffer.dtype
        filled = torch.full(buffer.shape, filling, dtype=dtype, device="cpu")
        setattr(own.get_submodule(at), last, filled)
    with torch.device("cpu"):  # the values are needed, so not on a default device like meta
        own.initialize_weights()
    return {name: own.get_buffer(name) for name in lacking}
