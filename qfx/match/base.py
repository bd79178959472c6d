"""Match: the base class for a node of a graph that contains a matmul.

`Site` is a matmul with a constant operand, `Product` a matmul of two activations, and `Attention`
two matmuls of activations with a softmax between them. `OwnCall` is an operator of qfx that the
model calls itself, and `Unmatched` a node that qfx leaves alone, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import fx

from qfx.graph.capture import device
from qfx.graph.views import View

Size = int | torch.SymInt
FLOAT = "float"  # the token of matmuls that run in float


@dataclass(frozen=True, kw_only=True)
class Match:
    """A node of a graph that contains a matmul. The sizes M, K and N are None if the graph does not
    determine them. `batch`: the number of matmuls; None for a linear. `token`: the scheme in which
    the node runs already, because it calls an int8 operator; otherwise `float`. `gemm`: whether the
    node runs already as one matmul of int8 matrices, for which the kernel is chosen by M."""

    node: fx.Node  # the matmul
    path: str  # of the calling module
    batch: Size | None = None
    m: Size | None = None
    k: Size | None = None
    n: Size | None = None
    token: str = FLOAT
    gemm: bool = False
    trains: bool = False  # whether gradients are recorded here

    @property
    def name(self) -> str:
        return self.path or self.node.name

    @property
    def out(self) -> fx.Node:
        """The last node that belongs to the match, for example an activation function."""
        return self.node

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the matmul with which the patterns `skip` and `only` are compared."""
        return (self.path,) if self.path else ()

    @property
    def left(self) -> tuple[fx.Node, View] | None:
        """The node of the left operand, and the view that makes it a matrix [..., K]; None if the
        left operand is int8 codes."""
        return None

    @property
    def weights(self) -> tuple[fx.Node, ...]:
        """The constants that are multiplied; empty for a matmul of two activations."""
        return ()

    @property
    def float_type(self) -> torch.dtype:
        """The dtype of the matmul in float."""
        return torch.float32

    @property
    def device(self) -> torch.device:
        """The device of the computation; the CPU if the graph does not determine it."""
        return device(self.left[0] if self.left else self.node)

    @property
    def shape(self) -> str:
        """The sizes as MxKxN, preceded by the batch."""
        sizes = "x".join("?" if s is None else str(s) for s in (self.m, self.k, self.n))
        return sizes if self.batch is None else f"{self.batch}*{sizes}"

    def recording(self) -> Match:
        """Returns the match for a graph in which gradients are recorded."""
        return self

    def closed(self, reason: str) -> Match:
        """Returns the match for a node that must not be rewritten, for this reason."""
        return Unmatched(node=self.node, path=self.path, reason=reason)


@dataclass(frozen=True, kw_only=True)
class Unmatched(Match):
    """A matmul-like node that cannot be rewritten, and the reason."""

    reason: str
    parameters: tuple[str, ...] = ()  # that patterns may name

    @property
    def names(self) -> tuple[str, ...]:
        return (*super().names, *self.parameters)

    @property
    def shape(self) -> str:
        return ""


Kind = TypeVar("Kind", bound=Match)


def of_kind(matches: Iterable[Match], kind: type[Kind]) -> Iterator[Kind]:
    return (match for match in matches if isinstance(match, kind))
