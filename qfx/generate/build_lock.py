"""Making programs: one at a time in the process, while other threads run those that are there.

torch.export marks the whole process as compiling while it traces, so two traces at once could leave
it marked, and a thread that only runs a program has to know that the mark is not of its own.
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
    """Waits for its turn; in it this thread may trace a model."""
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
