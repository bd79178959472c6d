"""Records statistics and samples of the activations that matmuls multiply, in bounded memory.

Matmuls with the same input share one record, just as they will share its quantized form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx

from qfx.calibration.recorder import Recorder, RowsOfExpert
from qfx.graph.views import View, apply
from qfx.match.base import Match
from qfx.match.experts import ExpertProduct
from qfx.match.selection import SiteKey, keyed_experts, keyed_sites
from qfx.match.site import Site
from qfx.ops.expert_rows import SortedRows
from qfx.ops.rotation import transformed_weight
from qfx.pipeline import Context, run_passes
from qfx.plan.exclusions import why_excluded
from qfx.values.config import Config
from qfx.values.limits import why_few_features
from qfx.values.scheme import Scheme

ROWS = 256  # at most, of a sample


class Updated(Protocol):
    """A consumer of a stream of activations."""

    def update(self, x: Tensor) -> None: ...


class Transform(NamedTuple):
    """The transform x' = rotate(x * factor) applied before x is quantized, with the columns
    `outliers` set to zero, equations (R1) and (R3)."""

    factor: Tensor | None = None
    rotation: int = 0
    outliers: tuple[int, ...] = ()

    def of(self, x: Tensor) -> Tensor:
        x = self._zeroed(x)
        return torch.ops.qfx.rotate(x.float(), self.factor, self.rotation)  # type: ignore[no-any-return]

    def of_weight(self, w_nk: Tensor) -> Tensor:
        return transformed_weight(self._zeroed(w_nk), self.factor, self.rotation).float()

    def in_float(self, x: Tensor, w_nk: Tensor) -> Tensor | float:
        """Returns the part x W^T of the outlier columns [M, N], which is computed in float; 0.0 if
        there are none."""
        columns = list(self.outliers)
        return x[:, columns] @ w_nk[:, columns].t() if columns else 0.0

    def _zeroed(self, t: Tensor) -> Tensor:
        if not self.outliers:
            return t
        return t.index_fill(
            -1, torch.tensor(self.outliers, dtype=torch.int64, device=t.device), 0.0
        )


@dataclass
class ActivationRecord:
    """Statistics of an activation [*, K] over all calls: the largest magnitude of each channel, and
    some of the rows.

    The rows are a uniform sample, whatever the number of batches, and the same sample every time,
    plus the few rows with the largest elements, which a sample would miss.
    """

    k: int
    room: int  # rows of the sample
    rows: int = 0
    calls: int = 0

    def __post_init__(self) -> None:
        self.absmax = torch.zeros(self.k, dtype=torch.float32, device="cpu")
        self.extreme = self.absmax.new_zeros(0, self.k)
        self._rows = self.absmax.new_zeros(
            0, self.k
        )  # written in place: new tensors would fragment memory
        self._drawn = self.absmax.new_zeros(0)  # the random number of each sampled row
        self._random = torch.Generator().manual_seed(0)

    @property
    def sample(self) -> Tensor:
        return self._rows[: self._drawn.numel()]

    def update(self, x: Tensor) -> None:
        x_mk = x.detach().reshape(-1, self.k).float()
        finite = x_mk.isfinite().all(1)
        x_mk = x_mk if finite.all() else x_mk[finite]
        self.calls += 1
        self.rows += x_mk.shape[0]
        if not x_mk.numel():
            return
        self.absmax = torch.maximum(self.absmax, x_mk.abs().amax(0))
        self._draw(x_mk)
        self.extreme = self._largest(torch.cat([self.extreme, self._largest(x_mk)]))

    def _largest(self, rows: Tensor) -> Tensor:
        """Returns the rows with the largest elements, in their original order."""
        largest = rows.abs().amax(1).topk(min(self.room // 8, rows.shape[0])).indices
        return rows[largest.sort().values]

    def _draw(self, x_mk: Tensor) -> None:
        """Gives each row a random number and keeps the rows with the smallest numbers."""
        count, added = self._drawn.numel(), x_mk.shape[0]
        drawn = torch.rand(added, generator=self._random, dtype=torch.float32, device="cpu")
        numbers = torch.cat([self._drawn, drawn])
        chosen = numbers.topk(min(self.room, numbers.numel()), largest=False).indices.sort().values
        old, new = chosen[chosen < count], chosen[chosen >= count] - count
        if not new.numel():
            return
        full = self._rows.shape[0] == self.room
        rows = self._rows if full else self._rows.new_empty(self.room, self.k)
        rows[: old.numel()] = self._rows[old]
        rows[old.numel() : chosen.numel()] = x_mk[new]
        self._rows, self._drawn = rows, numbers[chosen]

    def shrink(self, room: int) -> None:
        """Drops rows until only those remain that a sample of `room` rows would hold."""
        self.room = min(self.room, room)
        kept = self._drawn.topk(min(self.room, self._drawn.numel()), largest=False).indices
        kept = kept.sort().values
        if kept.numel() < self._drawn.numel():
            self._rows, self._drawn = self._rows[kept], self._drawn[kept]
        self.extreme = self._largest(self.extreme)


class CalibrationSite(NamedTuple):
    """A matmul with a weight (a site) during calibration: its key, the names with which patterns
    are compared, its weight, and the view that makes the weight [N, K]."""

    key: SiteKey
    names: tuple[str, ...]  # matched against patterns
    weight: Tensor
    view: View

    @property
    def w_nk(self) -> Tensor:
        return apply(self.view, self.weight.detach())

    @property
    def largest(self) -> Tensor:
        """The maxima max_n |w_nk|, float32 [K]."""
        w_nk = self.w_nk
        return torch.maximum(w_nk.amax(0), -w_nk.amin(0)).float()

    @property
    def power(self) -> Tensor:
        """The mean squares mean_n w_nk^2, float32 [K]."""
        return torch.linalg.vector_norm(self.w_nk, dim=0, dtype=torch.float32).square() / max(
            self.w_nk.shape[0], 1
        )


@dataclass(frozen=True)
class SharedInput:
    """A group: the matmuls with a weight (`readers`) that multiply the same activation, and the
    dtype of this activation. `product`: for one expert of a product of experts, whose activation is
    the tokens that it gets, the key of the product; otherwise None. `channels`: of a pixel, if the
    rows are windows of pixels."""

    activation: ActivationRecord
    readers: tuple[CalibrationSite, ...]
    dtype: torch.dtype
    product: SiteKey | None = None
    channels: int | None = None

    def block(self, scheme: Scheme) -> int:
        """Returns the rotation of the activation by this scheme."""
        return scheme.block(self.activation.k, self.channels)

    @property
    def m(self) -> int:
        """The average number M of rows of the activation per call."""
        return round(self.activation.rows / max(self.activation.calls, 1))


@dataclass
class Session:
    """The groups found in all graphs of a model, each by the key of its first matmul, and the
    observers of their inputs."""

    room: int = ROWS
    groups: dict[SiteKey, SharedInput] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)  # names that patterns may refer to
    observers: dict[SiteKey, list[tuple[Transform, Updated]]] | None = None  # of a further pass

    def run(self, gm: fx.GraphModule, prefixes: Mapping[str, str], arguments: Sequence[Any]) -> Any:
        """Runs one call of a captured graph, and records the inputs of the matmuls with a weight
        that can be int8."""
        matches = matches_of(gm, prefixes)
        self.names.update(name for m in matches for name in m.names)
        suited = [(key, site) for key, site in keyed_sites(matches) if not why_excluded(site)]
        experts = [each for each in keyed_experts(matches) if not why_few_features(each[1].k)]
        return _Inputs(gm, suited, self, experts).run(*arguments)

    def record(self, key: SiteKey, x: Tensor) -> None:
        if self.observers is None:
            self.groups[key].activation.update(x)
        else:
            for transform, observer in self.observers.get(key, ()):
                observer.update(transform.of(x))

    def fit(self, memory: float) -> None:
        """Limits the number of rows in all samples, also in later ones, so that they take at most
        `memory` bytes."""
        width = sum(g.activation.k for g in self.groups.values())
        self.room = min(self.room, max(int(memory / max(width * 4 * 9 / 8, 1)), 8))
        for group in self.groups.values():
            group.activation.shrink(self.room)


def matches_of(gm: fx.GraphModule, prefixes: Mapping[str, str]) -> Sequence[Match]:
    context = Context(Config(), prefixes=prefixes, around=None)
    return run_passes(gm, context, "match").matches


class _Inputs(Recorder):
    """A recorder that stores the inputs of matmuls in a session."""

    def __init__(
        self,
        gm: fx.GraphModule,
        sites: Sequence[tuple[SiteKey, Site]],
        session: Session,
        experts: Sequence[tuple[SiteKey, ExpertProduct]],
    ) -> None:
        super().__init__(gm, sites, experts)
        self.session = session

    def observed_experts(self, rows: list[RowsOfExpert], given: SortedRows) -> None:
        for each in rows:  # also of an expert without tokens, which has a record
            self._record([(each.key, each.site)], given.rows[each.begin : each.end], each.product)

    def observed(self, sites: list[tuple[SiteKey, Site]], x: Tensor) -> None:
        self._record(sites, x)

    def _record(
        self, sites: list[tuple[SiteKey, Site]], x: Tensor, product: SiteKey | None = None
    ) -> None:
        (key, first), *_ = sites
        if x.device.type != "cpu":
            raise ValueError(
                f"calibrate: {first.name} is on {x.device.type}; calibrate the model on the CPU, "
                "its recipe serves every device"
            )
        if key not in self.session.groups:
            readers = tuple(CalibrationSite(k, s.names, self.weight(s), s.view) for k, s in sites)
            made = ActivationRecord(x.shape[-1], self.session.room)
            self.session.groups[key] = SharedInput(made, readers, x.dtype, product, first.channels)
        self.session.record(key, x)
