"""Site, Unmatched and Match: what became of a matmul-like node, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from qfx.graph.capture import REPACKED, attribute, device, roots, value
from qfx.graph.views import View
from qfx.match.attention import Attention
from qfx.match.own_calls import OwnCall
from qfx.match.products import Product


@dataclass(frozen=True)
class Site:
    """One matmul with a constant right operand. `m`, `k`, `n`: None when the graph does not say."""

    node: fx.Node  # the matmul
    out: fx.Node  # the last node of its epilogue, the matmul itself when there is none
    x: fx.Node
    weight: fx.Node  # the constant itself
    view: View  # of the constant, to [N, K]
    bias: fx.Node | None
    activation: str
    m: int | torch.SymInt | None
    k: int | None
    n: int | None
    out_dtype: torch.dtype | None
    path: str
    parameter: str
    trains: bool = False  # gradients are recorded here
    x_view: View = ()  # of x, to [..., K]
    y_view: View = ()  # of the matmul's [..., N], to what the node returns

    @property
    def name(self) -> str:
        return self.path or self.node.name

    @property
    def repacked(self) -> str:
        """Why its weight is packed at every call although it does not train; "" where it is not."""
        reasons = (root.meta.get(REPACKED, "") for root in roots(self.weight))
        return "" if self.weight_trains else next(filter(None, reasons), "")

    @property
    def weight_trains(self) -> bool:
        return (
            self.trains
            and ("detach", ()) not in self.view
            and any(getattr(_constant(root), "requires_grad", False) for root in roots(self.weight))
        )


def _constant(node: fx.Node) -> Any:
    """The constant itself where the graph holds it: recorded values may be without gradients."""
    return attribute(node) if node.op == "get_attr" else value(node)


@dataclass(frozen=True)
class Unmatched:
    """A matmul-like node that is no site, and why."""

    node: fx.Node
    reason: str
    path: str

    @property
    def name(self) -> str:
        return self.path or self.node.name


Match = Site | Product | Attention | OwnCall | Unmatched


def device_of(match: Site | Product | Attention) -> torch.device:
    """Where it is computed; the CPU where the graph does not say."""
    if isinstance(match, Attention):
        return device(match.query)
    return device(match.a if isinstance(match, Product) else match.x)
