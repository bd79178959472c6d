"""Change detection: whether tensors are those of an earlier call, unchanged.

Of offloaded tensors only what PyTorch counts is looked at: reading their values would fetch them
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import qfx._C as _C
from qfx.host.tensors import version, weak_storage
from qfx.weights.offload import is_held


class Seen(Protocol):
    """The state of some of the arguments of a call."""

    def same_tensors(self, arguments: tuple[Any, ...]) -> bool:
        """Same tensors, with the same storages, addresses and versions."""

    def unchanged(self, arguments: tuple[Any, ...]) -> bool:
        """The same, and the same values where one looks."""


class _SeenHeld:
    """As `_C.Snapshot`, where some of the tensors are held by files."""

    def __init__(self, arguments: Sequence[Any], looked_at: list[int], held: list[int]) -> None:
        self._looked_at = _C.Snapshot(arguments, looked_at)
        self._stamps = [(p, _stamp(arguments[p])) for p in held]
        self._storages = [weak_storage(arguments[p]) for p in held]

    def same_tensors(self, arguments: tuple[Any, ...]) -> bool:
        return self._looked_at.same_tensors(arguments) and self._same_held(arguments)

    def unchanged(self, arguments: tuple[Any, ...]) -> bool:
        return self._looked_at.unchanged(arguments) and self._same_held(arguments)

    def _same_held(self, arguments: tuple[Any, ...]) -> bool:
        if any(p >= len(arguments) or _stamp(arguments[p]) != was for p, was in self._stamps):
            return False
        return not any(storage.expired() for storage in self._storages)


def _stamp(tensor: Any) -> tuple[int, int, int]:
    return id(tensor), tensor.data_ptr(), version(tensor)


def seen(arguments: Sequence[Any], positions: Sequence[int]) -> Seen:
    """The state of arguments[p], p in `positions`: tensors. It keeps none of them alive."""
    held = [p for p in positions if is_held(arguments[p])]
    if not held:
        snapshot: Seen = _C.Snapshot(arguments, list(positions))
        return snapshot
    return _SeenHeld(arguments, [p for p in positions if p not in held], held)
