"""Errors that end a command: one sentence on stderr and an exit code."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer

from qfx.io.errors import UserError, printable

P = ParamSpec("P")
T = TypeVar("T")
TRACEBACK = "QFX_TRACEBACK"  # the variable of the environment that shows tracebacks
FAILED = 1  # the exit code; that of words that the command does not know is 2


class CommandError(UserError):
    """Raised for what a command cannot do; the message says what to do instead."""


def one_sentence(command: Callable[P, T]) -> Callable[P, T]:
    """Returns the command with errors of its input printed as one line, in the place of a
    traceback, unless QFX_TRACEBACK is set. Defects of qfx keep theirs."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except (ValueError, OSError, ImportError, NotImplementedError) as why:
            if os.environ.get(TRACEBACK):
                raise
            text = " ".join(printable(line) for line in str(why).splitlines() if line.strip())
            print(f"qfx: {text or type(why).__name__}", file=sys.stderr)
            raise typer.Exit(FAILED) from why

    return run
