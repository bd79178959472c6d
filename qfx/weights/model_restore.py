"""Restores a model and the default random generators after code that ran inside `unchanged`.

The generators are those of torch for CPUs and CUDA, of Python and of numpy; `ModelSnapshot` says
what is restored of a model. Inputs and other generators are not restored.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from qfx.weights.model_snapshot import ModelSnapshot

_KEPT: ContextVar[ModelSnapshot] = ContextVar("kept")


@contextmanager
def unchanged(model: Callable[..., Any], who: str) -> Iterator[ModelSnapshot]:
    """Context manager that undoes the changes of `model` and of the random generators that are made
    inside the `with` block, also if it raises. Needs memory for a copy of the buffers.

    Warns, with `who` in the message, about parameters that code outside of captured graphs wrote
    to. These parameters keep the new values, because a copy of all parameters would double the
    memory of a model. Such writes through `.data` are not detected.
    """
    kept, generators = ModelSnapshot(module_of(model)), _generators()
    token = _KEPT.set(kept)
    try:
        yield kept
    finally:
        _KEPT.reset(token)
        written = kept.restore()
        for put_back in generators:
            put_back()
        if written:
            warnings.warn(
                f"qfx.{who}: the forward of the model wrote to its parameters "
                f"{', '.join(written)}, which could not be undone: they keep what it wrote",
                stacklevel=4,
            )


def restore_later(values: Iterable[Any]) -> None:
    """Saves the tensors among these values, which are about to be written. The surrounding
    `unchanged`, if there is one, restores them."""
    kept = _KEPT.get(None)
    for value in values:
        if kept is not None and isinstance(value, Tensor):
            kept.keep(value)


def in_training(model: Callable[..., Any]) -> str:
    """Returns a phrase that says which modules of the model are in training mode; '' if none
    are."""
    module = module_of(model)
    each = [m for m in module.modules() if not isinstance(m, fx.GraphModule)] if module else []
    count = sum(m.training for m in each)
    if not count:
        return ""
    return (
        "the model is" if count == len(each) else f"{count} of the model's {len(each)} modules are"
    )


def module_of(model: Any) -> nn.Module | None:
    """Returns the module that a callable runs: itself, the owner of a bound method, or the module
    inside a partial or `torch.compile`; None for a function."""
    while isinstance(model, partial):
        model = model.func
    owner = getattr(model, "__self__", None)
    for found in (getattr(model, "_orig_mod", None), model, owner):
        if isinstance(found, nn.Module):
            return found
    return None


def _generators() -> list[Callable[[], None]]:
    """Returns functions that restore the current state of the default generators."""
    found: list[Callable[[], None]] = [
        partial(torch.set_rng_state, torch.get_rng_state()),
        partial(random.setstate, random.getstate()),
    ]
    if torch.cuda.is_initialized():
        found.append(partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    if numpy := sys.modules.get("numpy.random"):
        found.append(partial(numpy.set_state, numpy.get_state()))
    return found
