"""A law of random graphs: exact operators, views, what PyTorch runs, and writes through any view
give what the graph gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from qfx.programs import build
from tests.programs.traced import aten, same

STRAIGHT = (
    aten.neg.default, aten.abs.default, aten.relu.default, aten.add.Tensor, aten.sub.Tensor,
    aten.mul.Tensor, aten.maximum.default, aten.minimum.default,
)  # fmt: skip
WRITING = (aten.add_.Tensor, aten.copy_.default, aten.mul_.Tensor, aten.maximum.out)
VIEWS: tuple[Callable[[Any], Any], ...] = (
    lambda v: aten.permute.default(v, [1, 0]),
    lambda v: aten.slice.Tensor(v, 0, 1, 3),
    lambda v: aten.slice.Tensor(v, 1, 0, 4, 2),
    lambda v: aten.expand.default(aten.slice.Tensor(v, 0, 1, 2), [4, -1]),
    lambda v: aten.select.int(v, 1, -1),
    lambda v: aten.reshape.default(aten.permute.default(v, [1, 0]), [-1]),
    lambda v: aten.unsqueeze.default(v, 0),
)
OUTSIDE: tuple[Callable[[Any], Any], ...] = (
    lambda v: aten.flip.default(v, [0]),
    lambda v: aten.cumsum.default(v, 0),
    lambda v: aten.sort.default(v, 0)[0],
)


@given(data=st.data())
def test_random_graphs_give_the_bits_of_eager(data: st.DataObject) -> None:
    inputs = (torch.randn(4, 4), torch.randn(4, 4))
    graph = fx.Graph()
    nodes = [graph.placeholder("x"), graph.placeholder("y")]
    values: list[tuple[fx.Node, Tensor]] = [
        (n, x.clone()) for n, x in zip(nodes, inputs, strict=True)
    ]
    for _ in range(data.draw(st.integers(1, 12))):
        _add_step(data, graph, values)
    last = data.draw(st.lists(st.sampled_from(values), min_size=1, max_size=4))
    graph.output(tuple(node for node, _ in last))
    gm = fx.GraphModule(nn.Module(), graph)
    runner = build(gm, inputs)
    for _ in range(2):
        given = [torch.randn(4, 4) for _ in inputs]
        expected_given = [x.clone() for x in given]
        found, expected = runner(*given), gm(*expected_given)
        for a, b in zip((*found, *given), (*expected, *expected_given), strict=True):
            assert same(a, b), gm.code


def _add_step(data: st.DataObject, graph: fx.Graph, values: list[tuple[fx.Node, Tensor]]) -> None:
    kind = data.draw(st.sampled_from(["straight", "straight", "view", "outside", "write"]))
    node, value = data.draw(st.sampled_from(values))
    if kind in ("view", "outside"):
        f = data.draw(st.sampled_from(VIEWS if kind == "view" else OUTSIDE))
        if (kind == "view" and value.ndim != 2) or value.ndim == 0:
            return
        traced = fx.symbolic_trace(f)
        try:
            found = f(value)
        except (RuntimeError, IndexError):
            return
        values.append((graph.graph_copy(traced.graph, {_first(traced): node}), found))  # type: ignore[arg-type]
        return
    target = data.draw(st.sampled_from(STRAIGHT if kind == "straight" else WRITING))
    same_size = [v for v in values if v[1].shape == value.shape]
    other, given = data.draw(st.sampled_from(same_size))
    named: dict[str, Any] = {}
    arguments: list[Any] = [node, other]
    if target in (aten.neg.default, aten.abs.default, aten.relu.default):
        arguments = [node]
    numbers = {node: value, other: given}
    if kind == "write":
        written = value
        if target is aten.maximum.out:
            to, written = data.draw(st.sampled_from(same_size))
            named, numbers[to] = {"out": to}, written
        overlaps = any(
            s == 0 and n > 1 for s, n in zip(written.stride(), written.shape, strict=True)
        )
        if overlaps:
            return
    try:
        found = target(
            *(numbers[a] for a in arguments), **{k: numbers[v] for k, v in named.items()}
        )
    except RuntimeError:  # operands that overlap in part
        return
    values.append((graph.call_function(target, tuple(arguments), named), found))


def _first(gm: fx.GraphModule) -> fx.Node:
    return next(iter(gm.graph.nodes))
