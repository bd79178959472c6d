"""Makes the positions of tokens inputs of a step, for an encoder-decoder whose decoder counts them.

T5 learns biases of attention for ranges of distances from query to key, and computes the range of
each distance at each step. The copy of a model that is captured looks up the ranges in a table, by
distances that are an input of the step. BART adds the number of earlier tokens to 0, 1, ...; in the
graph such sums become the positions that are an input of the step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from qfx.graph.capture import value

aten = torch.ops.aten
_here = threading.local()  # distances of the step that this thread captures


class Distances:
    """A table of the distances from queries to the keys of a cache that holds `length` tokens."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._rows = torch.arange(2 * length - 1, dtype=torch.int64, device="cpu").unfold(
            0, length, 1
        )

    def of(self, first: int, rows: int) -> Tensor:
        """Returns the distances for `rows` queries at places first, first + 1, ...: int64 [rows,
        L], key - query + L - 1. Queries beyond the last place have the distances of the last
        one."""
        begin = (
            self._length - 1 - torch.arange(first, first + rows, dtype=torch.int64, device="cpu")
        )
        return self._rows[begin.clamp(min=0)]


def learns_distances(model: nn.Module) -> bool:
    """Whether the decoder's attention has learned biases for distances from query to key, as in
    T5."""
    return any(True for _ in _learning(model))


def by_distances(model: nn.Module, length: int) -> None:
    """Makes the decoder of `model`, a copy that is captured, use the distances passed to
    `measured`, with keys in a cache of `length` places."""
    for module in _learning(model):
        noted = _Noted(module.relative_attention_bias)
        module._modules["relative_attention_bias"] = noted
        module.compute_bias(1, length, past_seen_tokens=length - 1)  # for the last query
        module._modules["relative_attention_bias"] = noted.learned
        later = torch.zeros(length - 1, dtype=torch.int64, device="cpu")  # hidden by masks
        ranges = torch.cat([noted.ranges.flatten(), later])[:, None]
        vars(module)["compute_bias"] = _Bias(noted.learned, ranges)


def given_positions(gm: fx.GraphModule) -> None:
    """Replaces positions[0, 0] + arange(T) by positions[0] in the graph of a step. `positions` [B,
    T] is the second input and counts up by one."""
    _, positions, *_ = gm.graph.find_nodes(op="placeholder")
    for node in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        counted = {_is_count(a, value(positions).shape[1]): a for a in node.args}
        first = counted.get(False)
        if node.kwargs or len(counted) != 2 or not _is_first(first, positions):
            continue
        with gm.graph.inserting_before(node):
            row = gm.graph.call_function(aten.select.int, (positions, 0, 0))
        row.meta["val"] = value(node)
        node.replace_all_uses_with(row)
    gm.graph.eliminate_dead_code()
    gm.recompile()


def _is_count(node: Any, rows: int) -> bool:
    """Whether the node returns 0, 1, ..., rows - 1."""
    return (
        isinstance(node, fx.Node)
        and node.target is aten.arange.default
        and node.args == (rows,)
        and value(node).dtype == torch.int64
    )


def _is_first(node: Any, positions: fx.Node) -> bool:
    """Whether the node returns positions[0, 0]."""
    for _ in range(2):
        if not isinstance(node, fx.Node) or node.target is not aten.select.int:
            return False
        if node.args[1:] != (0, 0):
            return False
        node = node.args[0]
    return node is positions


@contextmanager
def measured(distances: Tensor) -> Iterator[None]:
    """Makes attention that this thread computes inside the `with` block use the learned biases for
    `distances`, int64 [T, L] from `Distances.of`."""
    _here.distances = distances
    try:
        yield
    finally:
        del _here.distances


class _Noted(nn.Module):
    """Stands in for the embedding of learned biases, to record which ranges are looked up in it."""

    def __init__(self, learned: nn.Embedding) -> None:
        super().__init__()
        self.learned, self.weight = learned, learned.weight

    def forward(self, ranges: Tensor) -> Tensor:
        self.ranges = ranges.long()
        return torch.zeros(*ranges.shape, 1, dtype=torch.float32, device="cpu")


class _Bias:
    """Replaces the method `compute_bias` of T5: returns the learned biases [1, heads, T, L] for the
    distances passed to `measured`."""

    def __init__(self, learned: nn.Embedding, ranges: Tensor) -> None:
        self._learned, self._ranges = learned, ranges

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        ranges = nn.functional.embedding(_here.distances, self._ranges)[..., 0]
        return self._learned(ranges).permute(2, 0, 1)[None]  # type: ignore[no-any-return]


def _learning(model: Any) -> Iterator[Any]:
    for module in model.get_decoder().modules():
        names = ("_relative_position_bucket", "relative_attention_bias", "is_decoder")
        if all(hasattr(module, name) for name in names):
            yield module
