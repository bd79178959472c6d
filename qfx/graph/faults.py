"""Faults: defects of a pass, in contrast to errors of the user. They name the node at which they
occurred.

If a pass fails, whatever it raises, the graph stays float. Errors of the user, and exceptions that
PyTorch raises for Dynamo to catch, are passed on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import fx

from qfx.host.dynamo import control_flow
from qfx.io.errors import UserError


class PassFault(RuntimeError):
    """Raised in place of an exception of a pass, with the name of the node at which it occurred."""


@contextmanager
def at(node: fx.Node) -> Iterator[None]:
    """Adds the name of `node` to any fault that is raised inside the `with` block."""
    name = node.name
    try:
        yield
    except Exception as error:
        if is_fault(error) and not isinstance(error, PassFault):
            raise PassFault(f"at node {name}: {type(error).__name__}: {error}") from error
        raise


def is_fault(error: Exception) -> bool:
    return not isinstance(error, (UserError, *control_flow()))
