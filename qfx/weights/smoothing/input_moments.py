"""Records the inputs of a module's weights while it runs: the moments of each channel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qfx.host.tensors import Watching, storage_id, tree_leaves, weak_storage
from qfx.weights.change_detection import place_and_version

aten = torch.ops.aten
_SMALLEST = 2.0**-1022
_PRODUCTS: dict[Any, tuple[int, int]] = {  # positions of the arguments x [M, K] and weight [K, N]
    aten.mm.default: (0, 1),
    aten.addmm.default: (1, 2),
}


@dataclass
class Read:
    """A parameter that a run multiplied by: [N, K], or [K, N] with `axis` 0. `inputs`: the indices
    of its inputs in `Reads.moments`."""

    weight: Tensor
    axis: int
    inputs: set[int] = field(default_factory=set)


class ChannelMoments(NamedTuple):
    """Moments of the channels of activations x [M, K]: the mean over M of x_k^2, float32 [K], and
    of x_k^4, float64 [K]; `rows` is M."""

    square: Tensor
    fourth: Tensor
    rows: int

    @property
    def effective_rows(self) -> Tensor:
        """The number of rows among which the values of each channel are spread, float64 [K].

        The number is (sum x_k^2)^2 / sum x_k^4, with sums over the M rows. It is M for a channel of
        constant magnitude, M / 3 for a normally distributed channel, 1 for a channel that is
        nonzero in one row only, and 0 for a channel that is always 0."""
        return self.rows * self.square.double().square() / self.fourth.clamp_min(_SMALLEST)

    @classmethod
    def of(cls, x: Tensor) -> ChannelMoments:
        square = x.float().square()
        return cls(square.mean(0), square.double().square().mean(0), x.shape[0])

    @classmethod
    def joined(cls, each: Sequence[ChannelMoments]) -> ChannelMoments:
        """Returns the moments of several activations, with equal weights."""
        square = torch.stack([m.square for m in each]).mean(0)
        fourth = torch.stack([m.fourth for m in each]).mean(0)
        return cls(square, fourth, sum(m.rows for m in each))


@dataclass
class Reads:
    """The matmuls by parameters, and the lookups in tables, of one run of a module.

    `found`: the parameters, by storage and axis of K. `moments`: the moments of each input.
    `looked_up`: for the storage of each tensor of ids, the storages of the tables that it
    indexes.
    """

    found: dict[tuple[int, int], Read] = field(default_factory=dict)
    moments: list[ChannelMoments] = field(default_factory=list)
    looked_up: dict[int | None, set[int | None]] = field(default_factory=dict)
    used: set[int | None] = field(default_factory=set)  # storages of all arguments of operators

    def sets(self) -> Iterator[tuple[list[Read], ChannelMoments]]:
        """Yields groups of parameters that share an input, directly or through others, each with
        the joint moments of its inputs."""
        left = list(self.found.values())
        while left:
            joined, inputs = [left.pop(0)], set[int]()
            while inputs != (inputs := set().union(*(r.inputs for r in joined))):
                more = [r for r in left if r.inputs & inputs]
                joined += more
                left = [r for r in left if not r.inputs & inputs]
            yield joined, ChannelMoments.joined([self.moments[i] for i in sorted(inputs)])


def reads_of(run: Callable[[], Any], parameters: Iterable[Tensor]) -> Reads:
    """Calls `run` without gradients and returns the matmuls by these parameters, with the moments
    of their inputs."""
    mode = _Watch({storage_id(p): p.detach() for p in parameters})
    with torch.no_grad(), mode:
        run()
    return mode.reads


class _Watch(Watching):
    def __init__(self, parameters: dict[int | None, Tensor]) -> None:
        super().__init__()
        self.parameters, self.reads = parameters, Reads()
        self.places: dict[Any, int] = {}
        self.alive: list[Any] = []  # weak references, so that identities of storages are not reused

    def see(self, operator: Any, args: tuple[Any, ...]) -> None:
        self.reads.used.update(storage_id(a) for a in tree_leaves(args) if isinstance(a, Tensor))
        if operator is aten.embedding.default:
            self.alive.append(weak_storage(args[1]))
            tables = self.reads.looked_up.setdefault(storage_id(args[1]), set())
            tables.add(storage_id(args[0]))
        if operator not in _PRODUCTS:
            return
        x, w_kn = (args[i] for i in _PRODUCTS[operator])
        weight = self.parameters.get(storage_id(w_kn))
        axis = None if weight is None else _axis_of_k(w_kn, weight)
        if weight is None or axis is None or not x.numel():
            return
        key = (storage_id(weight) or 0, axis)
        read = self.reads.found.setdefault(key, Read(weight, axis))
        read.inputs.add(self._input(x))

    def _input(self, x: Tensor) -> int:
        place = place_and_version(x)
        if place not in self.places:
            self.alive.append(weak_storage(x))
            self.places[place] = len(self.reads.moments)
            self.reads.moments.append(ChannelMoments.of(x))
        return self.places[place]


def _axis_of_k(w_kn: Tensor, weight: Tensor) -> int | None:
    """Returns which axis of the parameter `weight` is the K of a matmul with w_kn [K, N]; None if
    the matmul does not read the whole parameter."""
    if weight.dim() != 2 or w_kn.storage_offset() != weight.storage_offset():
        return None
    for axis, whole in ((1, weight.t()), (0, weight)):
        if (w_kn.shape, w_kn.stride()) == (whole.shape, whole.stride()):
            return axis
    return None
