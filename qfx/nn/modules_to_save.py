"""Refuses PEFT's `modules_to_save`, and the heads of some task types, for int8 linears.

PEFT copies such a module and trains the parameters of the copy. The only trainable parameter of an
int8 linear is its bias, if it has one: training would run without an error and leave the weight of
the head unchanged. These modules must therefore stay float.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from qfx.nn.loading import StoredModule

_WRAPPER = ("peft.utils.other", "ModulesToSaveWrapper", "original_module")
_watching: list[Any] = []  # the handle of the hook, while there are such linears


def watch_wrappers(model: nn.Module) -> None:
    """Makes PEFT's wrapper refuse modules with int8 linears from now on.

    The hook slows down the construction of all modules, so it is registered only once `model`
    contains such a linear.
    """
    if not _watching and any(isinstance(module, StoredModule) for module in model.modules()):
        _watching.append(register_module_module_registration_hook(_refuse))


def _refuse(module: nn.Module, name: str, child: nn.Module | None) -> None:
    if torch.compiler.is_compiling():  # Dynamo traces code that creates a module
        return
    if child is None or (type(module).__module__, type(module).__name__, name) != _WRAPPER:
        return
    if name in dict(module.named_children()):  # quantize_ is replacing a module after training
        return
    for inner in child.modules():
        if isinstance(inner, StoredModule):
            raise ValueError(
                f"PEFT is asked to train a module whole (modules_to_save, or the head of a "
                f"task_type) that holds {inner}: its weight is codes, and does not train. Leave "
                'that module float: qfx.Config(skip=["classifier"]), or the name that it has'
            )
