"""Linears that quantize the same floats in the same way are one call, if they can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import qfx
from qfx.host.autograd import SET_GRAD_ENABLED
from qfx.ops.code import Code
from qfx.rewriting.fusion import fuse
from qfx.rewriting.notation import OF_MODEL
from tests.conftest import same_bits
from tests.lib.several import Weight, Weights

aten, ops = torch.ops.aten, torch.ops.qfx
OF = Weights(0, 64)
ONE, TWO, THREE = OF.int8(32), OF.int8(48), OF.in_groups(40, 32, "minimum")
ROWS = list(Code())
F32, LINEAR = torch.float32, torch.ops.qfx.linear.default
X, Y = torch.randn(2, 64, generator=OF.g), torch.randn(48, generator=OF.g)


def _linear(x: Any, w: Weight, bias: Any = None, **how: Any) -> Any:
    out, factor = how.pop("out_dtype", F32), how.pop("factor", None)
    how.setdefault("bits", 8)
    code = list(Code(**how))
    return ops.linear_dynamic.default(x, w.packed, list(w.layout), bias, code, "none", out, factor)


def _codes(x: Any, *given: Any) -> Any:
    parts = ops.quantize.default(x, ROWS, *given)
    return parts[0], parts[1], parts[2]


def _of_codes(codes: Any, w: Weight) -> Any:
    return ops.linear.default(*codes, w.packed, list(w.layout), None, "none", F32)


def _fused(f: Callable[..., Any]) -> tuple[fx.GraphModule, list[str]]:
    """What a function is fused to, and the operators of ours that are left."""
    gm = fx.symbolic_trace(f)
    fuse(gm)
    calls = [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]
    return gm, [name.split(".")[1] for name in calls if name.startswith("qfx.")]


def _two(x: Any, y: Any, between: str) -> Any:
    """What is between two linears of one input, or differs."""
    source = aten.neg.default(x)
    found = [_linear(source, ONE)]
    if between == "a change of it":
        aten.add_.Tensor(source, 1.0)
    if between == "a change of a view of it":
        aten.mul_.Tensor(aten.select.int(source, 0, 1), 2.0)
    if between == "a change of a bias":
        aten.add_.Tensor(y, 1.0)
    if between == "a function":
        found.append(aten.cumsum.default(found[0], 0))
    bias = {"a bias": aten.neg.default(y), "a change of a bias": y}.get(between)
    other = aten.neg.default(x) if between == "another input" else source
    how: dict[str, Any] = {
        "fewer bits": {"bits": 7},
        "another type": {"out_dtype": torch.bfloat16},
        "a factor": {"factor": torch.full((64,), 2.0)},
    }.get(between, {})
    return [*found, _linear(other, TWO, bias, **how)]


@pytest.mark.parametrize(
    ("between", "shared"),
    [
        ("nothing", True),
        ("a function", True),
        ("a change of it", False),
        ("a change of a view of it", False),
        ("a bias", False),
        ("a change of a bias", False),
        ("another input", False),
        ("fewer bits", False),
        ("another type", False),
        ("a factor", False),
    ],
)
def test_what_keeps_them_apart(between: str, shared: bool) -> None:
    f = lambda x, y: _two(x, y, between)  # noqa: E731
    gm, operators = _fused(f)
    assert operators == (["linears"] if shared else ["linear_dynamic"] * 2)
    assert all(map(same_bits, gm(X, Y.clone()), f(X, Y.clone())))


@pytest.mark.parametrize(
    ("function", "arguments"),
    [(torch._C._functorch._vmap_increment_nesting, (2, "error")), (SET_GRAD_ENABLED, (False,))],
)
def test_a_transform_and_a_region_without_gradients_begin_between(
    function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    gm = fx.symbolic_trace(lambda x: [_linear(x, ONE), _linear(x, TWO)])
    _, second = gm.graph.find_nodes(op="call_function", target=ops.linear_dynamic.default)
    with gm.graph.inserting_before(second):
        gm.graph.call_function(function, arguments)
    fuse(gm)
    assert "linears" not in gm.code


def test_others_go_on_where_one_begins_another_call() -> None:
    """The third reads what the second one begins."""

    def f(x: Any, y: Any) -> Any:
        first = _linear(x, ONE)
        bias = aten.neg.default(y)
        return [first, _linear(x, TWO, bias), _linear(x, THREE), _linear(x, TWO, bias)]

    gm, operators = _fused(f)
    assert operators == ["linear_dynamic", "linears"]
    assert all(map(same_bits, gm(X, Y), f(X, Y)))


@pytest.mark.parametrize(("between", "calls"), [(4, 1), (5, 2)])
def test_a_linear_of_another_layer_is_a_call_of_its_own(between: int, calls: int) -> None:
    """Its result would wait in memory until that layer runs."""

    def f(x: Any) -> Any:
        found = [_linear(x, ONE)]
        found += [_linear(aten.mul.Tensor(x, 2.0 + i), TWO) for i in range(between)]
        return [*found, _linear(x, THREE)]

    gm, operators = _fused(f)
    assert len(operators) == between + calls
    assert all(map(same_bits, gm(X), f(X)))


def test_a_linear_that_nobody_reads_is_left() -> None:
    def f(x: Any) -> Any:
        _linear(x, ONE)
        return _linear(x, TWO)

    assert _fused(f)[1] == ["linear_dynamic", "linear_dynamic"]


@pytest.mark.parametrize("written", [True, False])
def test_an_input_that_is_written_between(written: bool) -> None:
    """Two inputs may share their memory."""
    x = X.clone()

    def f(x: Any, y: Any) -> Any:
        found = [_linear(x, ONE)]
        aten.add_.Tensor(y, 1.0)
        return [*found, _linear(x, TWO)]

    gm, operators = _fused(f)
    assert operators == ["linear_dynamic"] * 2
    given, also = X.clone(), X.clone()
    pair = (given, given) if written else (given, x)
    expected = (also, also) if written else (also, x)
    assert all(map(same_bits, gm(*pair), f(*expected)))


# --- codes that several linears read ---


def test_linears_of_the_same_codes_are_one_call() -> None:
    def f(x: Any) -> Any:
        codes = _codes(x)
        return [_of_codes(codes, ONE), _of_codes(codes, TWO), _linear(x, ONE)]

    gm, operators = _fused(f)
    assert operators == ["linears"] and len(gm(X)) == 3
    assert all(map(same_bits, gm(X), f(X)))


def test_codes_that_something_else_reads_are_read_by_all() -> None:
    def f(x: Any) -> Any:
        codes = _codes(x)
        return [_of_codes(codes, ONE), _of_codes(codes, TWO), aten.neg.default(codes[0])]

    gm, operators = _fused(f)
    assert operators == ["quantize", "linear", "linear"]
    assert all(map(same_bits, gm(X), f(X)))
    again = fx.symbolic_trace(f)
    for place, node in enumerate(again.graph.find_nodes(op="call_function", target=LINEAR)):
        node.meta[OF_MODEL] = place
    assert fuse(again) == {i: ["no linear_dynamic: 3 matmuls read its codes"] for i in (0, 1)}


@pytest.mark.parametrize("given", [(torch.tensor([0.1]),), (None, None, torch.tensor([3]))])
def test_codes_of_given_scales_and_of_chance_stay(given: tuple[Any, ...]) -> None:
    def f(x: Any) -> Any:
        codes = _codes(x, *given)
        return [_of_codes(codes, ONE), _of_codes(codes, TWO)]

    gm, operators = _fused(f)
    assert operators == ["quantize", "linear", "linear"]
    assert all(map(same_bits, gm(X), f(X)))


def test_a_scale_that_is_given_by_name_is_given() -> None:
    scale = torch.tensor([0.1])

    def f(x: Any) -> Any:
        parts = ops.quantize.default(x, ROWS, scale=scale)
        return _of_codes((parts[0], parts[1], parts[2]), ONE)

    gm, operators = _fused(f)
    assert operators == ["quantize", "linear"] and same_bits(gm(X), f(X))


def test_a_factor_that_is_given_by_name_is_given() -> None:
    factor, rest = torch.rand(64) + 0.5, (None, ROWS, "none", F32)

    def f(x: Any) -> Any:
        call = ops.linear_dynamic.default
        one = call(x, ONE.packed, list(ONE.layout), *rest, factor=factor)
        return [one, call(x, TWO.packed, list(TWO.layout), *rest), _linear(x, ONE)]

    gm, operators = _fused(f)
    assert operators == ["linear_dynamic", "linears"]
    assert all(map(same_bits, gm(X), f(X)))


@pytest.mark.parametrize("into", ["x", "y", "its own"])
def test_codes_are_of_what_was_there(into: str) -> None:
    """A linear that would quantize what was written since, directly or through another input."""

    def f(x: Any, y: Any) -> Any:
        source = aten.neg.default(x)
        codes = _codes(source if into == "its own" else x)
        aten.add_.Tensor({"x": x, "y": y, "its own": source}[into], 3.0)
        return _of_codes(codes, ONE)

    gm, operators = _fused(f)
    assert operators == ["quantize", "linear"]
    shared, also = X.clone(), X.clone()
    pair = (shared, shared) if into == "y" else (shared, X.clone())
    expected = (also, also) if into == "y" else (also, X.clone())
    assert same_bits(gm(*pair), f(*expected))


# --- models ---


class Late(nn.Module):
    """The bias of b is computed behind a; what b reads is written to behind c."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.5
        y = self.a(x)
        z = F.linear(x, self.b.weight, y[0]) + self.a(x)
        x.add_(1)
        return z * self.c(x)


def test_a_plan_says_what_keeps_them_apart() -> None:
    model = Late().eval()
    gm, plan = qfx.rewrite(qfx.trace(model, X), qfx.Config(scheme="w8a8", minimum_gain=0))
    said = [entry.reason for entry in plan.entries]
    assert ["no linears" in reason for reason in said] == [False, True, False, True], plan
    assert "no linears: getitem comes after linear" in said[1]
    assert "no linears: add_ may write to what it reads" in said[3]
    with torch.no_grad():
        assert qfx.sqnr(model(X), gm(X)) > 25


def test_modules_of_int8_weights_share_what_they_read() -> None:
    """Their calls are the model's own."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.q(x) * torch.cat([self.k(x), self.v(x)], -1)

    model = qfx.quantize_(Attention().eval(), qfx.Config(scheme="w8a8"))
    with torch.no_grad():
        program = torch.export.export(model, (X,)).module()
        gm, plan = qfx.rewrite(program, qfx.Config(minimum_gain=0))
        names = [str(node.target) for node in gm.graph.nodes if "qfx" in str(node.target)]
        assert names == ["qfx.linears.default"] and plan.quantized == 3
        assert same_bits(gm(X), model(X))
        again, report = qfx.rewrite(gm, qfx.Config(minimum_gain=0))
        assert same_bits(again(X), model(X)) and report.quantized == 1
