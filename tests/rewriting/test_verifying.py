"""Verify: graphs that no pass may leave behind are told, at the node; sound ones pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import qfx
from qfx.graph.faults import PassFault
from qfx.ops.code import Code
from qfx.ops.forms import EXPERTS_STE, LINEAR, REQUANTIZE, STE
from qfx.rewriting.verify import READS_CODES, verify

ops = torch.ops.qfx
X = torch.randn(3, 64)


class Two(nn.Module):
    """Linears of two inputs, so that there are codes of two."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 32), nn.Linear(64, 32)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.a(x) + self.b(y)


def _canonical(scheme: str = "w8a8") -> fx.GraphModule:
    config = qfx.Config(scheme=scheme, minimum_gain=0)
    gm, _ = qfx.rewrite(qfx.trace(Two().eval(), X, X), config, canonical=True)
    return gm


def _calls(gm: fx.GraphModule, target: Any) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="call_function", target=target.default))


def _scale_of_other_codes(gm: fx.GraphModule) -> None:
    other, one = _calls(gm, ops.dequantize)
    one.args = (one.args[0], other.args[1], *one.args[2:])


def _zero_point_of_other_codes(gm: fx.GraphModule) -> None:
    other, one = _calls(gm, ops.int8_mm)
    one.args = (one.args[0], other.args[1], *one.args[2:])


def _scale_of_another_weight(gm: fx.GraphModule) -> None:
    other, one = _calls(gm, ops.weight_scale)
    one.args = other.args


def _products_as_result(gm: fx.GraphModule) -> None:
    acc = _calls(gm, ops.int8_mm)[0]
    with gm.graph.inserting_after(acc):
        gm.graph.call_function(torch.neg, (acc,))


def _products_for_nobody(gm: fx.GraphModule) -> None:
    last = _calls(gm, ops.int8_mm)[1]
    with gm.graph.inserting_after(last):
        gm.graph.call_function(ops.int8_mm.default, last.args)


def _a_written_constant(gm: fx.GraphModule) -> None:
    constant = next(n for n in gm.graph.nodes if n.op == "get_attr")
    with gm.graph.inserting_after(constant):
        gm.graph.call_function(torch.ops.aten.add_.Tensor, (constant, 1))


def _an_argument_too_few(gm: fx.GraphModule) -> None:
    one = _calls(gm, ops.int8_mm)[0]
    one.args = one.args[:-1]


def _none_for_a_tensor(gm: fx.GraphModule) -> None:
    one = _calls(gm, ops.dequantize)[0]
    one.args = (*one.args[:1], None, *one.args[2:])


BROKEN: list[tuple[Callable[[fx.GraphModule], None], str]] = [
    (_scale_of_other_codes, "is no dequantize"),
    (_zero_point_of_other_codes, "is no dequantize"),
    (_scale_of_another_weight, "is not .*, as weight is"),
    (_products_as_result, "products are read by neg"),
    (_products_for_nobody, "nothing reads its int32 products"),
    (_a_written_constant, "a constant"),
    (_an_argument_too_few, "has 3 arguments"),
    (_none_for_a_tensor, "has no scale"),
]


@pytest.mark.parametrize(("damage", "said"), BROKEN)
def test_a_broken_graph_is_told(damage: Callable[[fx.GraphModule], None], said: str) -> None:
    gm = _canonical()
    verify(gm, frozenset())
    damage(gm)
    with pytest.raises(PassFault, match=f"at node .*{said}"):
        verify(gm, frozenset())


class Shared(nn.Module):
    """Codes of either input are read by two linears, so that they are made apart from these."""

    def __init__(self) -> None:
        super().__init__()
        self.of_x, self.of_y = (
            nn.ModuleList([nn.Linear(X.shape[1], 32) for _ in range(2)]) for _ in range(2)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = self.of_x
        c, d = self.of_y
        return a(x) + b(x) + c(y) + d(y)


@pytest.mark.parametrize("scheme", ["w4a8", "w5a8", "w8a8-groups"])
def test_codes_of_one_call_alone(scheme: str) -> None:
    """Also where one operator reads them, as where products are no single int8 GEMM."""
    model, config = Shared().eval(), qfx.Config(scheme=scheme, minimum_gain=0)
    gm, _ = qfx.rewrite(qfx.trace(model, X, X), config, canonical=True)
    verify(gm, frozenset())
    readers = {call.args[0]: call for call in _calls(gm, ops.linear)}
    assert len(readers) == 2
    for other, one in itertools.permutations(readers.values()):
        one.args = (one.args[0], other.args[1], *one.args[2:])
        with pytest.raises(PassFault, match="is no linear"):
            verify(gm, frozenset())


def test_what_the_model_calls_itself_is_its_own_affair() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q, _, zero_point = ops.quantize(x, list(Code(symmetric=0)))
            return ops.int8_mm(q, zero_point, self.packed, 32).float()  # no dequantize

        def __init__(self) -> None:
            super().__init__()
            codes = torch.ones(32, 64, dtype=torch.int8)
            self.register_buffer("packed", ops.pack_weight(codes, torch.ones(32)))

    model = Own()
    gm, _ = qfx.rewrite(qfx.trace(model, X), qfx.Config(minimum_gain=0))
    assert torch.equal(gm(X), model(X))
    verify(gm, frozenset(gm.graph.nodes))


def test_every_form_that_reads_codes_is_looked_at() -> None:
    """An operator of a new row would else be trusted with the codes of another call."""
    called = {pattern.text.partition("(")[0] for pattern in READS_CODES}
    every = torch._C._jit_get_all_schemas()
    readers = {
        schema.name.removeprefix("qfx::")
        for schema in every
        if schema.name.startswith("qfx::linear")
        and {argument.name for argument in schema.arguments} & {"q", "codes"}
    }
    readers = {name for name in readers if not name.endswith("_backward")}  # in no such graph
    assert readers == called == {call.name for call in (LINEAR, REQUANTIZE, STE, EXPERTS_STE)}
