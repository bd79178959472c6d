"""Sequential rounding: rounds the weights of one group of matmuls after the other, on inputs from a
model whose preceding groups are already int8, equation (Q11).

All batches advance together, once in float and once rounded. Each run stops at the input of the
next group, so that every node runs once per batch. The price is memory: the tensors that each run
holds where it stops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from tqdm import tqdm

from qfx.calibration.batches import arguments_of
from qfx.calibration.gptq import ComparedMoments
from qfx.calibration.record import SharedInput, matches_of
from qfx.calibration.recorder import Recorder
from qfx.calibration.search import Candidate, rounded_activation
from qfx.dynamo_backend.captured_graphs import watch
from qfx.graph.views import apply
from qfx.io.errors import UserError
from qfx.match.selection import SiteKey, keyed_sites
from qfx.match.site import Site
from qfx.ops.single_tensors import Quantized, dequantize, quantize
from qfx.weights.model_restore import unchanged

Captured = tuple[fx.GraphModule, Mapping[str, str], Sequence[Any]]
Round = Callable[[SiteKey, ComparedMoments], Candidate]


def sequential(
    model: Callable[..., Any],
    batches: Iterable[Any],
    groups: Mapping[SiteKey, SharedInput],
    observer: str,
    progress: bool,
    chosen: Mapping[SiteKey, Candidate],
    round_group: Round,
) -> None:
    """Calls `round_group` for each int8 group of `chosen`, in the order in which the groups run.

    Raises ValueError if the model is not captured as one graph.
    """
    keys, errors = [key for key in groups if chosen[key].scheme], dict[SiteKey, _Error]()
    with unchanged(model, "calibrate"), torch.no_grad():
        captured = [_captured(model, batch) for batch in batches]
        runs = [(_Run(each, {}), _Run(each, errors)) for each in captured]
        for key in tqdm(keys, "rounding", disable=not progress):
            group, transform = groups[key], chosen[key].transform
            moments = ComparedMoments(group.activation.k)
            for in_float, rounded in runs:
                exact, x = in_float.until(key), rounded.until(key)
                if exact is not None and x is not None and exact.shape == x.shape:
                    moments.compare(transform.of(exact), transform.of(x))
            candidate = round_group(key, moments)
            for i, reader in enumerate(group.readers):
                errors[reader.key] = _Error(group, candidate, i, observer)


def _captured(model: Callable[..., Any], batch: Any) -> Captured:
    seen: list[Captured] = []

    def keep(gm: fx.GraphModule, prefixes: Mapping[str, str], arguments: Sequence[Any]) -> Any:
        seen.append((gm, dict(prefixes), arguments))
        return gm(*arguments)

    inputs, keywords = arguments_of(batch)
    watch(model, keep, *inputs, **keywords)
    if len(seen) != 1:
        raise UserError(
            f'calibrate: rounding="gptq-sequential" needs a model of one graph, but {len(seen)} '
            'were captured of a batch; "gptq" takes any number'
        )
    return seen[0]


class _Error:
    """Computes how much the output of a matmul changes if the matmul runs in int8."""

    def __init__(self, group: SharedInput, candidate: Candidate, i: int, observer: str) -> None:
        self.group, self.candidate, self.i, self.observer = group, candidate, i, observer

    @cached_property
    def stored(self) -> Quantized:  # with the candidate's codes, if it has some
        assert self.candidate.scheme is not None
        w_nk = self.candidate.transform.of_weight(self.group.readers[self.i].w_nk)
        found = quantize(w_nk, self.candidate.scheme.w)
        given = self.candidate.roundings
        return found._replace(codes=given[self.i].codes) if given else found

    def of(self, x: Tensor) -> Tensor:
        scheme, transform = self.candidate.scheme, self.candidate.transform
        assert scheme is not None
        x_mk, w_nk = x.reshape(-1, x.shape[-1]).float(), self.group.readers[self.i].w_nk.float()
        x_hat, activation = transform.of(x_mk), self.group.activation
        if scheme.x is not None:
            seen = transform.of(torch.cat([activation.sample, activation.extreme]))
            x_hat = rounded_activation(x_hat, scheme.x, self.observer, seen)
        in_int8 = x_hat @ dequantize(self.stored).t() + transform.in_float(x_mk, w_nk)
        return (in_int8 - x_mk @ w_nk.t()).reshape(*x.shape[:-1], -1)


class _Run(Recorder):
    """Runs a captured graph part by part. Adds the int8 error of each matmul in `errors` to the
    output of that matmul."""

    def __init__(self, captured: Captured, errors: Mapping[SiteKey, _Error]) -> None:
        gm, prefixes, arguments = captured
        super().__init__(gm, keyed_sites(matches_of(gm, prefixes)))
        self.args_iter = iter(arguments)
        self.errors, self.added = errors, dict[fx.Node, Tensor]()
        self.nodes, self.at = list(gm.graph.nodes), 0
        self.place = {sites[0][0]: self.nodes.index(n) for n, sites in self.first.items()}

    def until(self, key: SiteKey) -> Tensor | None:
        """Runs up to the group with this key and returns its input; None if the group does not come
        later in this graph."""
        stop = self.place.get(key, -1)
        if stop < self.at:
            return None
        for node in self.nodes[self.at : stop]:
            self.env[node] = self.run_node(node)
            for last in self.user_to_last_uses.get(node, ()):
                del self.env[last]
        self.at = stop
        site = self.first[self.nodes[stop]][0][1]
        x = apply(site.x_view, self.env[site.x])
        return x if x.numel() and x.is_floating_point() else None

    def observed(self, sites: list[tuple[SiteKey, Site]], x: Tensor) -> None:
        for key, site in sites:
            if key in self.errors:
                self.added[site.node] = apply(site.y_view, self.errors[key].of(x))

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        return result + self.added.pop(n).to(result.dtype) if n in self.added else result
