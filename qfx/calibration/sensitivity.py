"""Measures how much an error in a matmul's output changes the model's output, equation (D1).

A batch runs forward while autograd records, then backward. Some rows of each matmul's input are
sampled. For each pair of sampled rows, the scalar product of the gradients of the matmul's output
in these rows is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from qfx.calibration.record import matches_of
from qfx.calibration.recorder import Recorder, RowsOfExpert
from qfx.graph.views import apply
from qfx.host.autograd import without_autocast
from qfx.io.errors import UserError
from qfx.match.experts import ExpertProduct
from qfx.match.selection import SiteKey, keyed_experts, keyed_sites
from qfx.match.site import Site
from qfx.ops.expert_rows import SortedRows

ROWS = 256  # of a call; all of its M rows if it has no more


class SampledCall(NamedTuple):
    """One call of the matmuls that share an input. `x` [R, K]: the sampled rows of the input.
    `price` [R, R], for each matmul: mean_j g_tj g_uj for rows t and u of the gradient g of its
    output, times the number of pairs of rows that each pair represents. The price is NaN if
    gradients were turned off."""

    x: Tensor
    price: Mapping[SiteKey, Tensor]


@dataclass
class Gradients:
    """Collects the gradients of one batch. `random` draws the rows. `calls`: the sampled calls of
    each activation, by the key of the first matmul that multiplies it."""

    random: torch.Generator
    calls: dict[SiteKey, list[SampledCall]] = field(default_factory=dict)
    leaves: list[Tensor] = field(default_factory=list)

    def run(self, gm: fx.GraphModule, prefixes: Mapping[str, str], arguments: Sequence[Any]) -> Any:
        """Runs one call of a captured graph; parameters are constants to autograd."""
        constants = [a.detach() if isinstance(a, nn.Parameter) else a for a in arguments]
        matches = matches_of(gm, prefixes)
        sites, experts = keyed_sites(matches), keyed_experts(matches)
        return _Prober(gm, sites, self, experts).run(*constants)

    def back(self, losses: Tensor) -> None:
        """Runs the backward from the losses of the forward that ran. Gradients of parameters and
        inputs are not computed."""
        if not losses.numel():
            return
        if not losses.requires_grad:
            raise UserError(
                "calibrate: no gradient reaches a matmul from the loss: the model turns gradients "
                "off, or detaches what it returns; do without max_divergence"
            )
        try:
            with torch.inference_mode(False), torch.enable_grad():
                losses.sum().backward(inputs=self.leaves)
        except RuntimeError as why:  # as if the model writes in place what a gradient needs
            raise UserError(f"calibrate: the model has no gradients: {why}") from why

    def draw(self, x_mk: Tensor) -> tuple[Tensor, int]:
        """Returns the indices of the rows to keep, and the number of rows without a NaN or an
        infinity, from which they were drawn."""
        usable = x_mk.isfinite().all(1).nonzero().squeeze(1)
        count = usable.numel()
        order = torch.randperm(count, generator=self.random, dtype=torch.int64, device="cpu")
        return usable[order[:ROWS]].sort().values, count


class _Probe(NamedTuple):
    """Receives the gradient of the output of one matmul, of the shape `shape`, and stores its
    price."""

    site: Site
    shape: tuple[int, ...]
    kept: Tensor  # indices of the rows that are kept
    total: int  # the number of all usable rows
    price: Tensor

    @without_autocast
    def take(self, gradient: Tensor) -> None:
        g_mn = gradient.reshape(-1, gradient.shape[-1])[self.kept].float()
        self.price.copy_((g_mn @ g_mn.t()) / max(g_mn.shape[1], 1) * _pairs(self.total, len(g_mn)))


def _pairs(total: int, kept: int) -> Tensor:
    """Returns, [kept, kept], the number of pairs of all rows that each pair of sampled rows
    represents; on the diagonal, the number of rows that each row represents."""
    others = total * (total - 1) / max(kept * (kept - 1), 1)
    pairs = torch.full((kept, kept), others, dtype=torch.float32, device="cpu")
    return pairs.fill_diagonal_(total / max(kept, 1))


class _Prober(Recorder):
    """A recorder that adds a zero to the output of each matmul with a weight: the gradient of the
    zero is the gradient of the output."""

    def __init__(
        self,
        gm: fx.GraphModule,
        sites: Sequence[tuple[SiteKey, Site]],
        gradients: Gradients,
        experts: Sequence[tuple[SiteKey, ExpertProduct]],
    ) -> None:
        super().__init__(gm, sites, experts)
        self.gradients = gradients
        self.probes: dict[fx.Node, _Probe] = {}
        self.of_experts: dict[fx.Node, tuple[SortedRows, list[_Probe]]] = {}

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        found = super().get_attr(target, args, kwargs)
        return found.detach() if isinstance(found, nn.Parameter) else found

    def observed(self, sites: list[tuple[SiteKey, Site]], x: Tensor) -> None:
        self.probes.update({probe.site.node: probe for probe in self._probes(sites, x)})

    def observed_experts(self, rows: list[RowsOfExpert], given: SortedRows) -> None:
        self.of_experts[rows[0].site.node] = (
            given,
            [
                probe
                for each in rows
                for probe in self._probes(
                    [(each.key, each.site)], given.rows[each.begin : each.end]
                )
            ],
        )

    def _probes(self, sites: list[tuple[SiteKey, Site]], x: Tensor) -> Iterator[_Probe]:
        x_mk = x.detach().reshape(-1, x.shape[-1])
        kept, count = self.gradients.draw(x_mk)
        none = torch.zeros(len(kept), len(kept), dtype=torch.float32, device="cpu")
        prices = {key: none.clone() for key, _ in sites}
        calls = self.gradients.calls.setdefault(sites[0][0], [])
        calls.append(SampledCall(x_mk[kept].float(), prices))
        for key, site in sites:
            n = apply(site.view, self.weight(site)).shape[0]
            yield _Probe(site, (*x.shape[:-1], n), kept, count, prices[key])

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n in self.of_experts:
            return self._with_experts(result, n, *self.of_experts.pop(n))
        return self._probed(result, self.probes.pop(n)) if n in self.probes else result

    def _with_experts(
        self, result: Tensor, n: fx.Node, given: SortedRows, probes: list[_Probe]
    ) -> Tensor:
        """Adds the zeros of all experts to the output of a product, where their rows are."""
        zeros = [self._zero(result, probe) for probe in probes]
        tail = given.rows.shape[0] - sum(zero.shape[0] for zero in zeros)  # of no expert
        added = torch.cat([*zeros, result.new_zeros(tail, zeros[0].shape[1])])
        _, found = self.products[n]
        if found.rows.offsets is not None:
            return result + added
        return result + apply(found.site.y_view, given.back(added, found.experts))

    def _probed(self, result: Tensor, probe: _Probe) -> Tensor:
        return result + apply(probe.site.y_view, self._zero(result, probe))

    def _zero(self, result: Tensor, probe: _Probe) -> Tensor:
        """Returns zeros of the shape of the probe, which take no memory; their gradient goes to the
        probe. Without gradients, the price is NaN."""
        if not torch.is_grad_enabled():
            probe.price.fill_(torch.nan)
            return result.new_zeros(()).expand(probe.shape)
        leaf = result.new_zeros((), requires_grad=True)
        zero = leaf.expand(probe.shape)
        zero.register_hook(probe.take)
        self.gradients.leaves.append(leaf)
        return zero
