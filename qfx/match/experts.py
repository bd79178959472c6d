"""Products of experts: rows, each times the weight of its expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from qfx.graph.capture import value
from qfx.graph.views import View, apply
from qfx.match.base import Match
from qfx.match.site import Site
from qfx.ops.expert_rows import SortedRows, by_number, in_equal_parts


@dataclass(frozen=True)
class ExpertRows:
    """Tells which rows of a product belong to which of its E experts. With `offsets`, int32 [E]:
    rows [R, K] are sorted, and those of each expert end there. With `numbers`, integers [R]: rows
    [R, 1, K] each belong to the expert of this number. With neither: rows [E, M, K] in equal
    parts."""

    offsets: fx.Node | None = None
    numbers: fx.Node | None = None


@dataclass(frozen=True, kw_only=True)
class ExpertProduct(Match):
    """A matmul of M rows, each with the weight [N, K] of its expert.

    `site`: x, whose view gives the rows, and the constant, whose view gives the weights [E, N, K].
    `rows`: which rows are whose. `experts`: E.
    """

    site: Site
    rows: ExpertRows
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

    def sorted(self, x: Any, read: Callable[[fx.Node], Any]) -> SortedRows:
        """Returns the rows of `x`, to which the view of the site was applied, sorted by expert.
        `read`: returns the value of a node, a tensor or a traced value, as `x` is."""
        if self.rows.offsets is not None:
            return SortedRows(x, read(self.rows.offsets))
        if self.rows.numbers is None:
            return in_equal_parts(x, self.experts)
        return by_number(x, read(self.rows.numbers), self.experts)

    def recording(self) -> ExpertProduct:
        return replace(self, trains=True, site=self.site.recording())


def expert_product(site: Site, rows: ExpertRows, shape: tuple[int, ...] | None) -> Match | str:
    """Returns the match of a product of experts, or the reason why it is none. `shape`: of the
    weight after its view."""
    x = value(site.x)
    if shape is None or x is None:
        return "a product of experts of unknown shapes"
    experts, n, k = shape
    if why := _why_not_offsets(rows, experts):
        return why
    given = apply(site.x_view, x)
    if rows.offsets is not None and given.ndim != 2:
        return "a product of experts whose x is no matrix"
    m = given.shape[0] if given.ndim == 2 else given.shape[0] * given.shape[1]
    site = replace(site, m=m, k=k, n=n, experts=experts)
    return ExpertProduct(
        node=site.node, path=site.path, trains=site.trains, m=m, k=k, n=n,
        site=site, rows=rows, experts=experts,
    )  # fmt: skip


def _why_not_offsets(rows: ExpertRows, experts: int) -> str:
    if rows.offsets is None:
        return ""
    ends = value(rows.offsets)
    if ends is None:
        return "a product of experts of unknown shapes"
    if ends.dtype != torch.int32 or tuple(ends.shape) != (experts,):
        return f"a product of {experts} experts with offsets {list(ends.shape)} {ends.dtype}"
    return ""
