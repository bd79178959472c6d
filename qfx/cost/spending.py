"""Limits the processor time that one process may spend on measuring; after that, default times are
used.

A first compilation should not wait for tables. So cells of cost tables are measured when a decision
needs them, and only as long as `SPENDING.left` is true; after that `qfx/cost/default_tables.py` is
used.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from qfx.io.errors import UserError

VARIABLE = "QFX_MEASURING_SECONDS"
SECONDS = 1.5  # together with the last cell and the kernels, below 2
_UNLIMITED: ContextVar[bool] = ContextVar("unlimited", default=False)


class Spending:
    """A counter of processor seconds of all threads. `seconds`: the limit; by default the value of
    the environment variable QFX_MEASURING_SECONDS, or else SECONDS."""

    def __init__(self, seconds: float | None = None) -> None:
        self._spent, self._since = 0.0, 0.0
        self._running = False
        self._seconds = seconds

    @property
    def spent(self) -> float:
        """The seconds spent so far."""
        return self._spent + (time.process_time() - self._since if self._running else 0.0)

    @property
    def limit(self) -> float:
        """The limit in seconds. Raises ValueError if the variable holds no number of seconds."""
        if self._seconds is not None:
            return self._seconds
        text = os.environ.get(VARIABLE, "")
        try:
            seconds = float(text) if text else SECONDS
        except ValueError:
            seconds = -1.0
        if not seconds >= 0:
            raise UserError(f"{VARIABLE}={text!r} is not a number of seconds")
        return seconds

    @property
    def left(self) -> bool:
        """Whether another cell may be measured."""
        return not limited() or self.spent < self.limit

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Adds the processor time of the `with` block. Blocks must not be nested."""
        self._since, self._running = time.process_time(), True
        try:
            yield
        finally:
            self._spent, self._running = self.spent, False


SPENDING = Spending()


def limited() -> bool:
    """Whether plans may use default times instead of measured ones: everywhere but inside
    `unlimited`."""
    return not _UNLIMITED.get()


@contextmanager
def unlimited() -> Iterator[None]:
    """Removes the limit of measuring time inside the `with` block, as for a calibration, which
    takes minutes anyway."""
    token = _UNLIMITED.set(True)
    try:
        yield
    finally:
        _UNLIMITED.reset(token)
