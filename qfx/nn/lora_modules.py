"""Makes PEFT's LoRA layers around int8 linears `FusedLora`, also those that PEFT creates later."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from qfx.nn.linear import Linear

_LAYER = ("peft.tuners.lora.layer", "Linear")
_watching: list[Any] = []  # the handle of the hook, while there are int8 linears


def fuse_adapters(model: nn.Module) -> None:
    """Changes the class of such layers of `model`, and of each that PEFT creates around an int8
    linear from now on."""
    for module in [*model.modules()]:
        _fuse(module, "base_layer", getattr(module, "base_layer", None))
        if isinstance(module, Linear) and not _watching:
            _watching.append(register_module_module_registration_hook(_fuse))


def _fuse(module: nn.Module, name: str, child: Any) -> None:
    if torch.compiler.is_compiling() or name != "base_layer" or not isinstance(child, Linear):
        return
    if (type(module).__module__, type(module).__name__) == _LAYER:
        from qfx.nn.fused_lora import FusedLora

        module.__class__ = FusedLora
