"""Recorder: runs a captured graph and shows the activations that matmuls with a weight multiply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor, fx

from qfx.graph.capture import attribute
from qfx.graph.views import View, apply
from qfx.match.experts import ExpertProduct
from qfx.match.selection import SiteKey
from qfx.match.site import Site
from qfx.ops.expert_rows import SortedRows


class RowsOfExpert(NamedTuple):
    """The rows that one expert of a product gets in a call: the keys of the product and of the
    expert, the expert as a site, and where its rows begin and end."""

    product: SiteKey
    key: SiteKey
    site: Site
    begin: int
    end: int


def expert_rows(product: SiteKey, site: Site, ends: Sequence[int]) -> list[RowsOfExpert]:
    """Returns the rows of each expert. `ends`: where those of each end, from the first on."""
    name, call = product
    return [
        RowsOfExpert(
            product,
            (f"{name}.{e}", call),
            replace(site, view=(*site.view, ("select", (0, e)))),
            *at,
        )
        for e, at in enumerate(pairwise([0, *ends]))
    ]


class Recorder(fx.Interpreter):
    """An interpreter that runs a graph and observes the activations that matmuls with a weight
    multiply. For each such activation it calls `observed` with all sites (matmuls) that multiply
    it, and with the activation as a matrix [..., K]. For a product of experts it calls
    `observed_experts` with the rows of each, and with the activation."""

    def __init__(
        self,
        gm: fx.GraphModule,
        sites: Sequence[tuple[SiteKey, Site]],
        experts: Sequence[tuple[SiteKey, ExpertProduct]] = (),
    ) -> None:
        super().__init__(gm)
        self.products = {m.node: (key, m) for key, m in experts if m.node.graph is gm.graph}
        shared: dict[tuple[fx.Node, View], list[tuple[SiteKey, Site]]] = {}
        for key, site in sites:
            if site.node.graph is gm.graph:
                shared.setdefault((site.x, site.x_view), []).append((key, site))
        self.first = {sites[0][1].node: sites for sites in shared.values()}
        self._keep({site.weight for _, site in sites} | {m.site.weight for _, m in experts})
        self._keep({m.rows.numbers for _, m in experts if m.rows.numbers is not None})

    def _keep(self, weights: set[fx.Node]) -> None:
        """Prevents the interpreter from freeing weights, or numbers of experts, after their last
        direct use, which may be a view: the recorder reads them when their matmul runs."""
        for node, read in self.user_to_last_uses.items():
            self.user_to_last_uses[node] = [n for n in read if n not in weights]

    def run_node(self, n: fx.Node) -> Any:
        if n in self.first:
            sites = self.first[n]
            x = apply(sites[0][1].x_view, self.env[sites[0][1].x])
            if x.numel() and x.is_floating_point():
                self.observed(sites, x)
        if n in self.products:
            key, found = self.products[n]
            x = apply(found.site.x_view, self.env[found.site.x])
            given = found.sorted(x, self.env.__getitem__)
            rows = expert_rows(key, found.site, given.offsets.tolist())
            self.observed_experts(rows, given)
        return super().run_node(n)

    def observed(self, sites: list[tuple[SiteKey, Site]], x: Tensor) -> None:
        raise NotImplementedError

    def observed_experts(self, rows: list[RowsOfExpert], given: SortedRows) -> None:
        raise NotImplementedError

    def weight(self, site: Site) -> Tensor:
        found = self.env.get(site.weight)  # absent if the weight's node comes later in the graph
        return attribute(site.weight) if found is None else found
