"""What PEFT would train whole, `modules_to_save` and the heads of some tasks, must be float.

PEFT copies such a module and trains the parameters of the copy. Those of an int8 linear are its
bias, if it has one: the run would go through, and the head stay as it was.
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
    """From now on PEFT's wrapper refuses modules with int8 linears. Modules that are made look at
    one more hook, so nothing is watched before there is such a linear."""
    if not _watching and any(isinstance(module, StoredModule) for module in model.modules()):
        _watching.append(register_module_module_registration_hook(_refuse))


def _refuse(module: nn.Module, name: str, child: nn.Module | None) -> None:
    if torch.compiler.is_compiling():  # a module that is made in code which Dynamo traces
        return
    if child is None or (type(module).__module__, type(module).__name__, name) != _WRAPPER:
        return
    if name in dict(module.named_children()):  # quantize_ of a model that was trained before
        return
    for inner in child.modules():
        if isinstance(inner, StoredModule):
            raise ValueError(
                f"PEFT is asked to train a module whole (modules_to_save, or the head of a "
                f"task_type) that holds {inner}: its weight is codes, and does not train. Leave "
                'that module float: qfx.Config(skip=["classifier"]), or the name that it has'
            )
