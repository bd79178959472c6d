"""What may write in place, in every way a graph can say it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import qfx
from qfx.graph.writes import written_inputs, written_roots

aten = torch.ops.aten


def unknown(x: torch.Tensor) -> torch.Tensor:
    return x.zero_()


fx.wrap("unknown")
NODES: dict[str, tuple[Callable[..., Any] | str, tuple[str, ...], dict[str, Any], str]] = {
    "add": (torch.add, ("x", "y"), {}, ""),
    "method": ("add", ("x", "y"), {}, ""),
    "in_place_method": ("add_", ("x", "y"), {}, "x"),
    "set_item_method": ("__setitem__", ("x", "y"), {}, "x"),
    "dunder": ("__add__", ("x", "y"), {}, ""),
    "in_place_function": (torch.relu_, ("x",), {}, "x"),
    "keyword": (F.relu, ("x",), {"inplace": True}, "x"),
    "keyword_false": (F.relu, ("x",), {"inplace": False}, ""),
    "augmented": (operator.iadd, ("x", "y"), {}, "x"),
    "set_item": (operator.setitem, ("x", "y"), {}, "x"),
    "overload": (aten.add_.Tensor, ("x", "y"), {}, "x"),
    "pure_overload": (aten.add.Tensor, ("x", "y"), {}, ""),
    "out_overload": (aten.add.out, ("x", "y"), {"out": "z"}, "z"),
    "packet": (aten.add_, ("x", "y"), {}, "x"),
    "out": (torch.add, ("x", "y"), {"out": "z"}, "z"),
    "outs": (torch.sort, ("x",), {"out": ("y", "z")}, "yz"),
    "embedding": (F.embedding, ("x", "y"), {"max_norm": 1.0}, "xy"),
    "pure_embedding": (F.embedding, ("x", "y"), {}, ""),
    "norm_that_trains": (F.batch_norm, ("x", "y", "z"), {"training": True}, "yz"),
    "norm": (F.batch_norm, ("x", "y", "z"), {"training": False}, ""),
    "instance_norm": (F.instance_norm, ("x", "y", "z"), {}, "yz"),
    "instance_norm_of_running": (F.instance_norm, ("x", "y"), {"use_input_stats": False}, ""),
    "unknown": (unknown, ("x",), {}, "x"),
}


@pytest.mark.parametrize("name", NODES)
def test_written_inputs(name: str) -> None:
    target, arguments, keywords, expected = NODES[name]
    graph = fx.Graph()
    inputs = {n: graph.placeholder(n) for n in "xyz"}
    op = "call_method" if isinstance(target, str) else "call_function"
    keywords = torch.utils._pytree.tree_map(lambda v: inputs.get(str(v), v), keywords)
    node = graph.create_node(op, target, tuple(inputs[a] for a in arguments), keywords)
    assert {n.name for n in written_inputs(node)} == set(expected)


def test_list_of_written_tensors() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    assert written_inputs(graph.call_function(torch._foreach_mul_, ([x, y], 2.0))) == [x, y]


@pytest.mark.parametrize(("operands", "expected"), [("xyz", "y"), ("xy", "xy"), ("zyx", "y")])
def test_operands_that_a_body_writes(operands: str, expected: str) -> None:
    """All of them where they do not fit its placeholders."""
    body, graph = fx.Graph(), fx.Graph()
    a, b, _ = (body.placeholder(n) for n in "abc")
    body.output((body.call_method("add_", (body.call_method("t", (b,)), a)),))
    root = nn.Module()
    root.body = fx.GraphModule(root, body)
    inputs = {n: graph.placeholder(n) for n in "xyz"}
    given = (graph.get_attr("body"), "body", *(inputs[n] for n in operands))
    node = graph.call_function(torch.ops.higher_order.invoke_subgraph, given)
    fx.GraphModule(root, graph)
    assert {n.name for n in written_inputs(node) if n.name != "body"} == set(expected)


def test_positional_inplace() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert written_inputs(graph.call_function(F.hardtanh, (x, -1.0, 1.0, True))) == [x]
    assert written_inputs(graph.call_function(F.hardtanh, (x, -1.0, 1.0, False))) == []


@pytest.mark.parametrize(("inplace", "quantizes"), [(False, 1), (True, 2)])
def test_an_in_place_module_between_two_readers(inplace: bool, quantizes: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.act = nn.Linear(8, 8), nn.Linear(8, 8), nn.Hardswish(inplace)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 2
            y = self.a(x)
            z = self.act(x)
            return y + self.b(x) + z

    model, x = Model(), torch.randn(4, 8)
    config = qfx.Config(minimum_gain=0, scheme="w8a8-asymmetric")
    gm, _ = qfx.rewrite(qfx.trace(model, x), config, canonical=True)
    nodes = [n for n in gm.graph.nodes if n.target is torch.ops.qfx.quantize.default]
    assert len(nodes) == quantizes
    with torch.no_grad():
        assert qfx.sqnr(model(x), gm(x)) > 25


def test_roots_are_found_through_views() -> None:
    graph = fx.Graph()
    w, x = graph.placeholder("w"), graph.placeholder("x")
    view = graph.call_function(operator.getitem, (graph.call_method("t", (w,)), 0))
    graph.call_method("add_", (view, x))
    assert written_roots(graph) == {w}


class _Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.w
        kept = torch.zeros_like(y)
        kept.copy_(y)
        y.add_(1)
        return kept + y


def test_writing_a_result_is_no_write_to_the_weight_behind_it() -> None:
    """As the caches of decoders do: a computed tensor is nobody's alias."""
    report = qfx.explain(_Writes(), torch.randn(4, 8), options={"minimum_gain": 0})
    assert report.quantized == 1, report
