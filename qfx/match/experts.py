"""Products of experts: rows that are sorted by expert, each times the weight of its expert."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from qfx.graph.capture import value
from qfx.graph.views import View
from qfx.match.base import Match
from qfx.match.site import Site


@dataclass(frozen=True, kw_only=True)
class ExpertProduct(Match):
    """A matmul of rows [M, K], sorted by expert, each with the weight [N, K] of its expert.

    `site`: x and the constant, whose view gives the weights [E, N, K]. `offsets`: int32 [E], where
    the rows of each expert end. `experts`: E.
    """

    site: Site
    offsets: fx.Node
    experts: int
    k: int
    n: int

    @property
    def names(self) -> tuple[str, ...]:
        return replace(self.site, path=self.path).names

    @property
    def left(self) -> tuple[fx.Node, View]:
        return self.site.left

    @property
    def weights(self) -> tuple[fx.Node, ...]:
        return self.site.weights

    @property
    def float_type(self) -> torch.dtype:
        return self.site.float_type

    def recording(self) -> ExpertProduct:
        return replace(self, trains=True, site=self.site.recording())


def expert_product(site: Site, offsets: fx.Node, shape: tuple[int, ...] | None) -> Match | str:
    """Returns the match of a product of experts, or the reason why it is none. `shape`: of the
    weight after its view."""
    ends, x = value(offsets), value(site.x)
    if shape is None or ends is None or x is None:
        return "a product of experts of unknown shapes"
    experts, n, k = shape
    if ends.dtype != torch.int32 or tuple(ends.shape) != (experts,):
        return f"a product of {experts} experts with offsets {list(ends.shape)} {ends.dtype}"
    if x.ndim != 2:
        return "a product of experts whose x is no matrix"
    site = replace(site, m=x.shape[0], k=k, n=n, experts=experts)
    return ExpertProduct(
        node=site.node, path=site.path, trains=site.trains, m=x.shape[0], k=k, n=n,
        site=site, offsets=offsets, experts=experts,
    )  # fmt: skip
