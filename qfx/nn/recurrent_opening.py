"""Gives recurrent modules a linear for each weight while a model is quantized or loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from qfx.host.modules import registries, share_hooks
from qfx.nn.left_float import note_of_children
from qfx.nn.linear import Linear
from qfx.nn.lsq import LSQLinear
from qfx.nn.recurrent import Recurrent
from qfx.nn.recurrent_like import OPENED, is_recurrent, why_not_opened


@contextmanager
def opened_recurrent(
    model: nn.Module, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[None]:
    """Replaces recurrent modules of `model` by those of `qfx.nn` with float linears, and at the end
    takes back those in which no linear became int8, or all after an error. `wanted`: whether to
    replace the module of this name."""
    opened = {
        module: _opened(module)
        for name, module in model.named_modules(remove_duplicate=False)
        if name and is_recurrent(module) and not why_not_opened(module) and wanted(name)
    }
    _exchange(model, opened)
    back = {new: old for old, new in opened.items()}
    try:
        yield
        back = {new: old for new, old in back.items() if not _is_int8(new)}
        for new, old in back.items():
            note_of_children(old, new)
    finally:
        _exchange(model, back)


def _is_int8(module: nn.Module) -> bool:
    return any(isinstance(child, Linear | LSQLinear) for child in module.children())


def _exchange(model: nn.Module, new: Mapping[Any, nn.Module]) -> None:
    for parent in [*model.modules()]:
        for name, child in [*parent._modules.items()]:  # a child may have several names
            if child in new:
                setattr(parent, name, new[child])


def _opened(module: Any) -> Recurrent:
    """Returns the module of `qfx.nn` with the parameters of `module` and all that users added to
    it: hooks, attributes, tensors and children."""
    made = OPENED[type(module)].from_float(module)
    share_hooks(module, made)
    like = _like(module)
    own = {n: v for n, v in vars(module).items() if n not in vars(like)}
    vars(made).update(own)
    for of, known, to in zip(*map(registries, (module, like, made)), strict=True):
        to.update({name: value for name, value in of.items() if name not in known})
    return made


def _like(module: Any) -> nn.Module:
    """Returns a new module of the same class and options, on the meta device."""
    names = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "bidirectional")
    options = {name: getattr(module, name) for name in names if hasattr(module, name)}
    with torch.device("meta"):  # takes no random numbers
        return type(module)(**options)  # type: ignore[no-any-return]
