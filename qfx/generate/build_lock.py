"""A lock for building programs: one thread builds at a time, while others run existing programs.

torch.export marks the whole process as compiling while it traces. Two traces at once could leave
the mark set, and a thread that only runs a program must be able to see that another thread set the
mark.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_turn = threading.RLock()
_maker: int | None = None  # the thread that traces


@contextmanager
def building_alone() -> Iterator[None]:
    """Waits until no other thread is building; inside the `with` block this thread may trace a
    model."""
    global _maker
    with _turn:
        before, _maker = _maker, threading.get_ident()
        try:
            yield
        finally:
            _maker = before


def is_compiling() -> bool:
    """Whether this thread is being traced or compiled."""
    if torch.compiler.is_dynamo_compiling():
        return True
    return torch.compiler.is_compiling() and _maker in (None, threading.get_ident())
