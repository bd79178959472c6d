"""Memo: a value that a module derives from its tensors, kept until one of them changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qfx.host.tensors import fake_mode_of, is_fake
from qfx.weights.cache import CACHE
from qfx.weights.change_detection import Snapshot, snapshot


class Memo:
    """A value that a module derives from its tensors, derived again when one of them may have
    changed.

    A copy of a memo is empty, because a copied module derives the value from its own tensors.
    """

    def __init__(self) -> None:
        self._epoch = -1
        self._of: Snapshot | None = None
        self._value: Any = None

    def get(self, tensors: tuple[Tensor, ...], derive: Callable[[], Any]) -> Any:
        """Returns `derive()`, or its earlier result for the same values of `tensors`."""
        if torch.compiler.is_compiling() or any(map(is_fake, tensors)):
            return derive()
        epoch, before = CACHE.epoch, self._of
        if before is None or self._epoch != epoch or not before.unchanged(tensors):
            if fake_mode_of(()) is not None:  # what is derived now has no values
                return derive()
            now = snapshot(tensors)
            self._value = derive()
            self._of, self._epoch = now, epoch
        return self._value

    def __reduce__(self) -> Any:
        return Memo, ()
