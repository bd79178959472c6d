"""Passes packed weights from the cache to a rewritten graph, in place of the float weights.

At run time nothing here refers to graph nodes: these would keep the graph, and what Dynamo recorded
in it, alive.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import qfx._C as _C
from qfx.graph.views import View
from qfx.host.autograd import in_forward_mode
from qfx.host.tensors import FakeMode, fake_mode_of, is_fake
from qfx.io.pages import trim
from qfx.ops.packing import Constant, Packing
from qfx.weights.cache import CACHE, pack
from qfx.weights.change_detection import Snapshot, snapshot
from qfx.weights.folded import Fold, FoldedConstants, with_examples


class WeightSource(NamedTuple):
    """The origin of a packed weight: the position of the argument with the float weight, the view
    that makes it [N, K], and how it is packed."""

    argument: int
    view: View
    packing: Packing


class PackedPart(NamedTuple):
    """One tensor of a packed weight, or a constant. `source`: the index of the weight in
    `GraphInputs.sources`, or the length of `GraphInputs.sources` for a constant. `part`: the index
    of the tensor among those of the weight, or among the constants."""

    source: int
    part: int


@dataclass(frozen=True)
class GraphInputs:
    """The inputs of a rewritten graph, each given by its origin: the position of an argument of the
    original graph, or a PackedPart. `sources`: the origins of the packed weights. `constants`: the
    vectors from recipes. `folds`: tensors that are computed from arguments; their positions are
    those after the `count` arguments."""

    inputs: tuple[int | PackedPart, ...]
    sources: tuple[WeightSource, ...]
    constants: tuple[Constant, ...] = ()
    folds: tuple[Fold, ...] = ()
    count: int = 0

    def gather(self, arguments: Sequence[Any], packed: Sequence[Sequence[Tensor]]) -> list[Any]:
        """Returns the inputs of the rewritten graph. `packed`: the tensors of each source, then the
        constants."""
        return [
            arguments[i] if isinstance(i, int) else packed[i.source][i.part] for i in self.inputs
        ]

    @property
    def only_packed(self) -> frozenset[int]:
        """The positions of the weights that the rewritten graph reads only in packed form, not in
        float."""
        only = frozenset(source.argument for source in self.sources) - frozenset(self.inputs)
        return frozenset(i for i in only if not self.folds or i < self.count)

    def order(self) -> list[int]:
        """Returns the origins for `_C.Gather`: positions of arguments, or -1 - i for the i-th
        packed tensor."""
        before = list(accumulate((len(s.packing.parts) for s in self.sources), initial=0))
        return [i if isinstance(i, int) else -1 - before[i.source] - i.part for i in self.inputs]


def example_inputs(
    graph_inputs: GraphInputs, examples: Sequence[Any], real: bool = False
) -> list[Any]:
    """Returns example inputs of the rewritten graph, from `examples` of the original graph. Packed
    weights are fake tensors if there is a fake mode and they need not be `real`."""
    fake_mode = None if real else fake_mode_of(examples)
    examples = with_examples(graph_inputs.folds, examples)
    packed = []
    for source in graph_inputs.sources:
        weight = examples[source.argument]
        if is_fake(weight) or fake_mode is None:
            packed.append(CACHE.get(weight, source.view, source.packing).tensors)
        else:
            with fake_mode:
                fake = fake_mode.from_tensor(weight, static_shapes=True)
                packed.append(pack(fake, source.view, source.packing).tensors)
    constants = [constant.tensor() for constant in graph_inputs.constants]
    return graph_inputs.gather(examples, [*packed, _as_fake(constants, fake_mode)])


def _fake_mode(arguments: Sequence[Any]) -> FakeMode | None:
    return next((a.fake_mode for a in arguments if is_fake(a)), None)


def _as_fake(tensors: Sequence[Tensor], mode: FakeMode | None) -> Sequence[Tensor]:
    return [mode.from_tensor(t, static_shapes=True) for t in tensors] if mode else tensors


def _refuse_tangents(arguments: Sequence[Any]) -> None:
    for i, argument in enumerate(arguments):
        if isinstance(argument, Tensor) and forward_ad.unpack_dual(argument).tangent is not None:
            raise NotImplementedError(
                f"input {i} of a graph with int8 matmuls carries a forward-mode tangent, which the "
                "int8 operators cannot propagate; run this computation without the qfx backend"
            )


REWRITTEN = 4  # consecutive calls that pack a tensor until it counts as an activation


@dataclass
class _InputsCache:
    """The packed tensors of the weights with which one layer calls the graph. They are valid while
    these weights and the generation of the cache of packed weights do not change."""

    generation: int
    weights: Snapshot
    packed: tuple[weakref.ref[Tensor], ...]  # the cache owns these, the wrapper the constants
    repacked: Counter[int]  # argument -> number of consecutive calls, up to now, that packed it
    used: bool = False

    @property
    def dead(self) -> bool:
        return any(tensor() is None for tensor in self.packed)

    @property
    def current(self) -> bool:
        return self.generation == CACHE.generation

    def written_unseen(self, arguments: tuple[Any, ...]) -> bool:
        """Whether a change that was found is a write that PyTorch did not count: the stamps of the
        weights are still the same."""
        return self.current and self.weights.same_tensors(arguments)


def with_packed_weights(
    compiled: Callable[..., Any],
    graph_inputs: GraphInputs,
    rewritten: Callable[[Iterable[int]], None] | None = None,
    offload_weight: Callable[[Tensor], bool] | None = None,
) -> Callable[..., Any]:
    """Returns a function with the arguments of the original graph. It calls the rewritten graph
    `compiled`, for which it takes packed weights from the cache in place of float weights.

    All layers with equal graphs call the same function, each with its own weights, so it remembers
    the packed tensors for the weights of each layer. It compares the whole content of the weights
    with the cache at the first call with them, and after each write to them that PyTorch did not
    count.

    `rewritten` is called with the positions of arguments that were packed at each of the last
    REWRITTEN calls; parameters are not among them. `offload_weight` is called with each weight that
    is packed and that the graph does not read in float. It may free the memory of the float
    values, and returns whether it did.
    """
    holders = [source.argument for source in graph_inputs.sources]
    constants = tuple(constant.tensor() for constant in graph_inputs.constants)
    gather = _C.Gather(graph_inputs.order())
    folded = FoldedConstants(graph_inputs.folds)
    known: dict[int, _InputsCache] = {}  # by the identity of the first weight
    last: _InputsCache | None = None

    def from_cache(arguments: tuple[Any, ...]) -> Sequence[Any]:
        nonlocal known, last
        if fake := _fake_mode(arguments):
            packed, _ = _packed(graph_inputs, arguments)
            return graph_inputs.gather(arguments, [*packed, _as_fake(constants, fake)])
        before, generation = known.get(_identity(arguments, holders)), CACHE.generation
        weights = snapshot(arguments, holders)  # before they are read
        if before is None or before.written_unseen(arguments):
            CACHE.distrust(arguments[i] for i in holders)
        packed, fresh = _packed(graph_inputs, arguments)
        if offload_weight and _offloaded_any(graph_inputs, arguments, offload_weight):
            return graph_inputs.gather(
                arguments, [*packed, constants]
            )  # known again at the next call
        counts = _counts(before or (last if last and last.dead else None), arguments, fresh)
        found = [*packed, constants]
        given = tuple(weakref.ref(tensor) for parts in found for tensor in parts)
        last = _InputsCache(generation, weights, given, counts)
        alive = {first: k for first, k in known.items() if not k.dead}
        known = {**alive, _identity(arguments, holders): last}
        often = [position for position, count in counts.items() if count >= REWRITTEN]
        if often and rewritten:
            rewritten(often)
        return graph_inputs.gather(arguments, found)

    def as_before(arguments: tuple[Any, ...]) -> Sequence[Any] | None:
        found = known.get(_identity(arguments, holders))
        if found is None or not found.current:
            return None
        if not holders and _fake_mode(arguments):
            return None
        if not found.weights.unchanged(arguments):
            return None
        found.used = True
        return gather(arguments, found.packed)

    @torch.compiler.disable
    def run(*arguments: Any) -> Any:
        if in_forward_mode():
            _refuse_tangents(arguments)
        arguments = folded.after(arguments)
        return compiled(*(as_before(arguments) or from_cache(arguments)))

    return run


def _identity(arguments: Sequence[Any], holders: Sequence[int]) -> int:
    return id(arguments[holders[0]]) if holders else 0


def _packed(
    graph_inputs: GraphInputs, arguments: Sequence[Any]
) -> tuple[list[Sequence[Tensor]], set[int]]:
    """Returns the packed tensors of each weight in `graph_inputs.sources`, and the positions of the
    arguments that were packed just now because the cache did not have them."""
    found: list[Sequence[Tensor]] = []
    fresh: set[int] = set()
    for argument, view, packing in graph_inputs.sources:
        packs = CACHE.packs
        found.append(CACHE.get(arguments[argument], view, packing).tensors)
        if CACHE.packs != packs:
            fresh.add(argument)
    return found, fresh


def _offloaded_any(
    graph_inputs: GraphInputs, arguments: Sequence[Any], offload_weight: Callable[[Tensor], bool]
) -> bool:
    """Calls `offload_weight` for each weight that the graph reads only in packed form; returns
    whether memory was freed."""
    found = [offload_weight(arguments[i]) for i in graph_inputs.only_packed]
    trim()  # also at later calls, for memory that compiling has left
    return any(found)


def _counts(
    before: _InputsCache | None, arguments: Sequence[Any], fresh: Iterable[int]
) -> Counter[int]:
    """Returns, for each argument in `fresh` (those that this call packed), for how many calls in a
    row it was packed. Parameters are left out, because they change for a while and then stay.
    `before`: the state after the previous call."""
    again = before is not None and not before.used and before.current
    counts = before.repacked if before is not None and again else Counter[int]()
    return Counter({i: counts[i] + 1 for i in fresh if not isinstance(arguments[i], nn.Parameter)})
