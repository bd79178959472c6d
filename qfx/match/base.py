"""Match: what became of one matmul-like node, as a value. Stages ask it, whatever its kind.

`Site` has a constant operand, `Product` two activations, `Attention` two products with a softmax
between; `OwnCall` is an operator of ours that the model calls itself, `Unmatched` has a reason.
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
FLOAT = "float"  # the token of what runs in float


@dataclass(frozen=True, kw_only=True)
class Match:
    """Its sizes are None where the graph does not say them, `batch` also for a linear. `token`: the
    scheme that it has whatever is decided, or `float`. `gemm`: then it is one product of int8
    matrices, whose kernel depends on M."""

    node: fx.Node  # the matmul
    path: str  # of the module that calls it
    batch: Size | None = None
    m: Size | None = None
    k: Size | None = None
    n: Size | None = None
    token: str = FLOAT
    gemm: bool = False
    trains: bool = False  # gradients are recorded here

    @property
    def name(self) -> str:
        return self.path or self.node.name

    @property
    def out(self) -> fx.Node:
        """The last node that belongs to it."""
        return self.node

    @property
    def names(self) -> tuple[str, ...]:
        """What patterns are matched against."""
        return (self.path,) if self.path else ()

    @property
    def left(self) -> tuple[fx.Node, View] | None:
        """The activation that is multiplied, and its view to a matrix; None where it is codes."""
        return None

    @property
    def weights(self) -> tuple[fx.Node, ...]:
        """The constants that it multiplies: none of a product of two activations."""
        return ()

    @property
    def float_type(self) -> torch.dtype:
        """The type of the matmul in float."""
        return torch.float32

    @property
    def device(self) -> torch.device:
        """Where it is computed; the CPU where the graph does not say."""
        return device(self.left[0] if self.left else self.node)

    @property
    def shape(self) -> str:
        """MxKxN, a batch before them."""
        sizes = "x".join("?" if s is None else str(s) for s in (self.m, self.k, self.n))
        return sizes if self.batch is None else f"{self.batch}*{sizes}"

    def recording(self) -> Match:
        """The same where gradients are recorded."""
        return self

    def closed(self, reason: str) -> Match:
        """The same where, for this reason, nothing may be rewritten."""
        return Unmatched(node=self.node, path=self.path, reason=reason)


@dataclass(frozen=True, kw_only=True)
class Unmatched(Match):
    """A matmul-like node that is no site, and why."""

    reason: str

    @property
    def shape(self) -> str:
        return ""


Kind = TypeVar("Kind", bound=Match)


def of_kind(matches: Iterable[Match], kind: type[Kind]) -> Iterator[Kind]:
    return (match for match in matches if isinstance(match, kind))
