"""Defects of qfx's own pass: they name the node they happened at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import fx

# What a defect of the pass can raise. User errors are ValueErrors, raised before the pass starts.
FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
)


class PassFault(RuntimeError):
    """A defect of the pass, at a node."""


@contextmanager
def at(node: fx.Node) -> Iterator[None]:
    """Names `node` in whatever goes wrong inside."""
    name = node.name
    try:
        yield
    except FAULTS as fault:
        raise PassFault(f"at node {name}: {type(fault).__name__}: {fault}") from fault
