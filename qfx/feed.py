"""The inputs of a rewritten graph: float weights out, packed weights in, fed from the cache.

At run time nothing here refers to graph nodes: they would keep the graph, and what Dynamo recorded
in it, alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

from qfx import _C
from qfx.provide import Slot
from qfx.scheme import QSpec
from qfx.views import View
from qfx.weights import CACHE, Packed, pack


class Source(NamedTuple):
    """A packed weight: which argument holds the float weight, and how it is packed."""

    argument: int
    view: View
    spec: QSpec


class Part(NamedTuple):
    """One tensor of a packed weight."""

    source: int
    part: int


@dataclass(frozen=True)
class Feed:
    """Where each input of the rewritten graph comes from: an argument's position, or a Part."""

    inputs: tuple[int | Part, ...]
    sources: tuple[Source, ...]

    def gather(self, arguments: Sequence[Any], packed: Sequence[Packed]) -> list[Any]:
        """The inputs of the rewritten graph."""
        return [
            arguments[i] if isinstance(i, int) else packed[i.source][i.part] for i in self.inputs
        ]

    def order(self) -> list[int]:
        """The same for `_C.Gather`: arguments, or -1 - i for the i-th of all packed tensors."""
        parts = len(Packed._fields)
        return [i if isinstance(i, int) else -1 - i.source * parts - i.part for i in self.inputs]


def drop_unused_inputs(gm: fx.GraphModule, slots: Sequence[Slot]) -> Feed:
    """Removes the graph inputs that only int8 sites read; says where the others come from."""
    parts = {node: Part(s, p) for s, slot in enumerate(slots) for p, node in enumerate(slot.nodes)}
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    position = {n: i for i, n in enumerate(n for n in placeholders if n not in parts)}
    sources = tuple(Source(position[s.weight], s.view, s.spec) for s in slots)
    inputs: list[int | Part] = []
    for node in placeholders:
        if node in parts:
            inputs.append(parts[node])
        elif node.users or not isinstance(node.meta.get("example_value"), Tensor):
            inputs.append(position[node])
        else:
            gm.graph.erase_node(node)
            node.meta.clear()  # the graph still knows the node, and this refers to the parameter
    gm.recompile()
    return Feed(tuple(inputs), sources)


def example_inputs(feed: Feed, examples: Sequence[Any]) -> list[Any]:
    """Example inputs of the rewritten graph, the packed ones fake where there is a fake mode."""
    fake_mode = detect_fake_mode(examples)
    packed = []
    for source in feed.sources:
        weight = examples[source.argument]
        if isinstance(weight, FakeTensor) or fake_mode is None:
            packed.append(CACHE.get(weight, source.view, source.spec))
        else:
            with fake_mode:
                fake = fake_mode.from_tensor(weight, static_shapes=True)
                packed.append(pack(fake, source.view, source.spec))
    return feed.gather(examples, packed)


def _refuse_tangents(arguments: Sequence[Any]) -> None:
    for i, argument in enumerate(arguments):
        if isinstance(argument, Tensor) and forward_ad.unpack_dual(argument).tangent is not None:
            raise NotImplementedError(
                f"input {i} of a graph with int8 matmuls carries a forward-mode tangent, which the "
                "int8 operators cannot propagate; run this computation without the qfx backend"
            )


class _Known(NamedTuple):
    """What was packed last: valid while the weights and the cache's generation stay."""

    generation: int
    weights: _C.Snapshot
    packed: tuple[weakref.ref[Tensor], ...]  # the cache owns them


def with_packed_weights(compiled: Callable[..., Any], feed: Feed) -> Callable[..., Any]:
    """Calls `compiled` with the original arguments, float weights replaced by packed ones."""
    holders = [source.argument for source in feed.sources]
    gather = _C.Gather(feed.order())
    known: _Known | None = None

    def from_cache(arguments: tuple[Any, ...]) -> Sequence[Any]:
        nonlocal known
        fake = isinstance(arguments[holders[0]], FakeTensor)
        generation = CACHE.generation
        weights = None if fake else _C.Snapshot(arguments, holders)  # before they are read
        found = [CACHE.get(arguments[s.argument], s.view, s.spec) for s in feed.sources]
        if weights is not None:
            packed = tuple(weakref.ref(tensor) for parts in found for tensor in parts)
            known = _Known(generation, weights, packed)
        return feed.gather(arguments, found)

    def as_before(arguments: tuple[Any, ...]) -> Sequence[Any] | None:
        last = known
        if last is None or last.generation != CACHE.generation:
            return None
        return gather(arguments, last.packed) if last.weights.unchanged(arguments) else None

    @torch._dynamo.disable
    def run(*arguments: Any) -> Any:
        if forward_ad._current_level >= 0:
            _refuse_tangents(arguments)
        return compiled(*(as_before(arguments) or from_cache(arguments)))

    return run
