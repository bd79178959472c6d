"""Patterns: what they find, what they say of a node that differs, what templates make of it."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from qfx.graph.patterns import Pattern, Template

CALLS = {
    "add": (torch.add, operator.add),
    "mul": (torch.mul,),
    "split": (torch.chunk,),
    "detach": (torch.detach,),
    "cat": (torch.cat,),
    "clamp": (torch.ops.aten.clamp.default,),
}


def _graph(function: Any) -> fx.Graph:
    return fx.symbolic_trace(function).graph


def _last(function: Any) -> fx.Node:
    (node,) = _graph(function).output_node().all_input_nodes
    return node


def _halves(x: Tensor, y: Tensor) -> Tensor:
    parts = torch.chunk(x, 2)
    return torch.add(torch.mul(parts[0], y), parts[1])


FOUND: list[tuple[Any, str, dict[str, str], dict[str, str]]] = [
    (lambda x, y: torch.add(x, y), "add(a, b)", {}, {"a": "x", "b": "y"}),
    (lambda x, y: x + y, "add(a, b)", {}, {"a": "x", "b": "y"}),
    (lambda x, y: torch.add(x, x), "add(a, a)", {}, {"a": "x"}),
    (lambda x, y: torch.add(torch.mul(x, 2), y), "add(mul(a, 2), b)", {}, {"a": "x", "b": "y"}),
    (lambda x, y: torch.add(x, y), "add(*all)", {}, {"all": "(x, y)"}),
    (_halves, "add(mul(t[0], y), t[1])", {"t": "split(x, *how)"},
     {"t": "chunk", "y": "y", "x": "x", "how": "(2,)"}),
    (lambda x, y: torch.add(x, y), "add(a, b)", {"b": "node"}, {"a": "x", "b": "y"}),
    (lambda x, y: torch.cat([x, y], 1), "cat([a, b], 1)", {}, {"a": "x", "b": "y"}),
    (lambda x, y: torch.cat([x, y], 1), "cat(all, axis)", {}, {"all": "[x, y]", "axis": "1"}),
    (_halves, "add(p, t[1])", {"p": "mul(t[0], y)", "t": "split(x, 2)"},
     {"p": "mul", "t": "chunk", "y": "y", "x": "x"}),
]  # fmt: skip


@pytest.mark.parametrize(("function", "text", "where", "bound"), FOUND)
def test_found(function: Any, text: str, where: dict[str, str], bound: dict[str, str]) -> None:
    node, wanted = _last(function), Pattern(text, CALLS, **where)
    assert wanted.starts_at(node)
    found = wanted.match(node)
    assert isinstance(found, dict), found
    assert {name: str(what) for name, what in found.items()} == bound


OTHERS: list[tuple[Any, str, dict[str, str], str]] = [
    (lambda x, y: torch.add(x, y), "add(a, a)", {}, "y is not x, as a is"),
    (lambda x, y: torch.add(x, y), "add(mul(a, 2), b)", {}, "x is no call of mul"),
    (lambda x, y: torch.add(torch.mul(x, 3), y), "add(mul(a, 2), b)", {}, "3 is not 2"),
    (lambda x, y: torch.add(torch.mul(x, True), y), "add(mul(a, 1), b)", {}, "True is not 1"),
    (lambda x, y: torch.add(x, y), "add(a)", {}, "there are 2 arguments, not 1"),
    (lambda x, y: torch.add(x, y), "add(a, b, c, *rest)", {}, "there are 2 arguments, not 3"),
    (_halves, "add(mul(t[1], y), t[0])", {"t": "split(x, 2)"}, "getitem is no t[1]"),
    (_halves, "add(mul(t[0], y), t[1])", {"t": "mul(x, 2)"}, "chunk is no call of mul"),
    (lambda x, y: torch.add(x, 2), "add(a, b)", {"b": "node"}, "2 is no node, as b is"),
    (lambda x, y: torch.cat([x, y]), "cat([a, a])", {}, "y is not x, as a is"),
    (lambda x, y: torch.cat([x, y]), "cat([a])", {}, "there are 2 arguments, not 1"),
    (lambda x, y: torch.cat(x), "cat([a])", {}, "x is no list"),
]


@pytest.mark.parametrize(("function", "text", "where", "difference"), OTHERS)
def test_another(function: Any, text: str, where: dict[str, str], difference: str) -> None:
    assert Pattern(text, CALLS, **where).match(_last(function)) == difference


def test_two_results_of_two_calls_are_not_those_of_one() -> None:
    def twice(x: Tensor) -> Tensor:
        return torch.add(torch.chunk(x, 2)[0], torch.chunk(x, 2)[1])

    found = Pattern("add(t[0], t[1])", CALLS, t="split(x, 2)").match(_last(twice))
    assert found == "chunk_1 is not chunk, as t is"


def test_calls_may_stand_between_where_a_pattern_lets_them() -> None:
    def far(x: Tensor, y: Tensor) -> Tensor:
        return torch.add(torch.detach(torch.detach(torch.mul(x, 2))), y)

    text = "add(mul(a, 2), b)"
    assert Pattern(text, CALLS).match(_last(far)) == "detach_1 is no call of mul"
    assert isinstance(Pattern(text, CALLS, through=(torch.detach,)).match(_last(far)), dict)


def test_a_template_is_made_from_what_the_names_stand_for() -> None:
    node = _last(_halves)
    bound = Pattern("add(mul(t[0], y), t[1])", CALLS, t="split(x, *how)").match(node)
    assert isinstance(bound, dict)
    made = Template("mul(t[1], [y, 3], *how)", CALLS)
    assert made.target is torch.mul
    part, some, two = made.arguments(bound)
    assert (part, two) == (node.args[1], 2)
    assert [str(each) for each in some] == ["y", "3"]


def test_what_a_call_leaves_out_has_the_default_of_its_operator() -> None:
    """In patterns as in templates, which leave it out again."""
    clamp = torch.ops.aten.clamp.default
    wanted = Pattern("clamp(a, low, high)", CALLS)
    for graph, high in (
        (_last(lambda x, y: clamp(x, 1)), None),
        (_last(lambda x, y: clamp(x, 1, 2)), 2),
    ):
        bound = wanted.match(graph)
        assert isinstance(bound, dict) and (bound["low"], bound["high"]) == (1, high)
    assert Pattern("clamp(a, 1, None)", CALLS).match(_last(lambda x, y: clamp(x, 1)))
    assert Pattern("clamp(a, *how)", CALLS).match(_last(lambda x, y: clamp(x, 1)))["how"] == (1,)
    made = Template("clamp(a, low, high)", CALLS)
    assert made.arguments({"a": 0, "low": None, "high": None}) == (0,)
    assert made.arguments({"a": 0, "low": None, "high": 2}) == (0, None, 2)
