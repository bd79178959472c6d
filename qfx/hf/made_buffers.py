"""Tables of positions and the like of a model of transformers on the meta device, made by the model
itself, as from_pretrained does."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def made_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Of those modules that have such buffers and no parameters."""
    found: dict[str, Tensor] = {}
    for at, owner in model.named_modules():
        if isinstance(owner, PreTrainedModel):
            for name, module in owner.named_modules(prefix=at):
                found |= {f"{name}.{b}".lstrip("."): t for b, t in _made(owner, module).items()}
    return found


def _made(owner: PreTrainedModel, module: nn.Module) -> dict[str, Tensor]:
    """What comes out the same whatever was there before: the rest the model does not make."""
    outside = module._non_persistent_buffers_set
    lacking = [
        n for n, b in module._buffers.items() if n in outside and b is not None and b.is_meta
    ]
    if not lacking or module._parameters:
        return {}
    first, second = (_initialised(owner, module, filling) for filling in (0, 1))
    return {n: first[n] for n in lacking if torch.equal(first[n], second[n])}


def _initialised(owner: PreTrainedModel, module: nn.Module, filling: int) -> dict[str, Tensor]:
    own = copy.deepcopy(module).to_empty(device="cpu").float()  # a model in bfloat16 has them so
    with torch.no_grad():
        for buffer in own.buffers():
            buffer.fill_(filling)
        owner._init_weights(own)
    return dict(own.named_buffers(recurse=False))
