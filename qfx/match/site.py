"""Site: a matmul with a constant right operand."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from qfx.graph.capture import REPACKED, attribute, roots, value
from qfx.graph.computed import sources_of
from qfx.graph.views import View
from qfx.match.base import Match
from qfx.match.norm import Norm


@dataclass(frozen=True, kw_only=True)
class Site(Match):
    """A matmul out = y_view(activation(x_view(x) @ view(weight).T + bias_view(bias))) with a
    constant weight."""

    x: fx.Node
    weight: fx.Node  # the constant itself
    view: View  # from the constant to [N, K]
    bias: fx.Node | None = None
    bias_view: View = ()  # from bias to [N]
    activation: str = "none"
    k: int | None = None
    n: int | None = None
    out_dtype: torch.dtype | None = None
    parameter: str = ""
    others: tuple[str, ...] = ()  # the parameters that other calls of the body pass instead
    x_view: View = ()  # from x to [..., K]
    y_view: View = ()  # from the matmul's [..., N] to the node's result
    experts: int = 0  # whose weights [E, N, K] the view gives; 0 for one weight
    end: fx.Node | None = None  # the last node of the epilogue, if there is one
    norm: Norm | None = None  # between the bias and the activation

    @property
    def out(self) -> fx.Node:
        return self.end or self.node

    @property
    def names(self) -> tuple[str, ...]:
        # a tied weight has one name, but the calling module's own name for it also counts
        called = f"{self.path}.{self.parameter.rpartition('.')[2]}" if self.path else ""
        return tuple(n for n in (self.path, self.parameter, called) if n)

    @property
    def alike(self) -> tuple[str, ...]:
        """The names of this matmul in the other calls of the subgraph that contains it; empty
        unless the calling module is the one that holds the weight."""
        owners = [p.rpartition(".")[0] for p in (self.parameter, *self.others)]
        return tuple(owners[1:]) if owners[0] == self.path else ()

    @property
    def left(self) -> tuple[fx.Node, View]:
        return self.x, self.x_view

    @property
    def weights(self) -> tuple[fx.Node, ...]:
        return sources_of(self.weight) or tuple(roots(self.weight))

    @property
    def channels(self) -> int | None:
        """The number of channels of a pixel, of those of one group, if the rows of x are windows of
        several pixels."""
        return None if self._taps == 1 or not self.k else self.k // self._taps

    @property
    def _taps(self) -> int:
        return next((math.prod(how[0]) for step, how in self.x_view if step == "im2col"), 1)

    @property
    def pixels(self) -> int:
        """The number of pixels that are read for a row of x, by all groups of channels, if the rows
        are windows of several pixels; otherwise 0."""
        shape = getattr(value(self.x), "shape", None)
        if shape is None or self.channels is None:
            return 0
        return int(self._taps * shape[1] // self.channels)

    @property
    def float_type(self) -> torch.dtype:
        return self.out_dtype or torch.float32

    def without_norm(self) -> Site:
        """Returns the match without the batch norm and what follows it."""
        if self.norm is None:
            return self
        (before,) = (n for n in self.norm.node.all_input_nodes if n not in self.norm.constants)
        end = None if before is self.node else before
        return replace(self, norm=None, activation="none", end=end)

    def recording(self) -> Site:
        return replace(self, trains=True)

    @property
    def repacked(self) -> str:
        """The reason why the weight is packed at every call although it does not train; "" if it is
        not."""
        reasons = (root.meta.get(REPACKED, "") for root in self.weights)
        return "" if self.weight_trains else next(filter(None, reasons), "")

    @property
    def weight_trains(self) -> bool:
        return (
            self.trains
            and ("detach", ()) not in self.view
            and any(getattr(_constant(root), "requires_grad", False) for root in self.weights)
        )


def _constant(node: fx.Node) -> Any:
    """Returns the constant itself if the graph holds it, because recorded values may lack
    gradients."""
    return attribute(node) if node.op == "get_attr" else value(node)
