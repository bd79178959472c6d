"""The canonical and the fused graph: their printed forms, and that they give the same bits."""

from __future__ import annotations

from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import qfx
from qfx.graph.activations import ACTIVATIONS
from tests.lib.models import FEATURES, Block
from tests.lib.strategies import PACKED

ops = torch.ops.qfx
CONFIG = qfx.Config(scheme="w8a8-asymmetric", minimum_gain=0)


class Shared(nn.Module):
    """q and k read x, the MLP's matmuls have an epilogue."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.up = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(self.q(x) * self.k(x)))


def _calls(gm: fx.GraphModule) -> str:
    lines = []
    for node in gm.graph.nodes:
        if node.op == "call_function":
            name = getattr(node.target, "_opname", None) or node.target.__name__
            lines.append(f"{node.name} = {name}{node.args}")
    return "\n".join(lines)


class TestPrintedGraphs(expecttest.TestCase):
    maxDiff = None

    def test_canonical(self) -> None:
        gm, _ = qfx.rewrite(qfx.trace(Shared(), torch.randn(2, 8)), CONFIG, canonical=True)
        self.assertExpectedInline(
            _calls(gm),
            """\
x_quantize = quantize(x, [8, 0, 0, 0, 0])
x_q = getitem(x_quantize, 0)
x_scale = getitem(x_quantize, 1)
x_zero_point = getitem(x_quantize, 2)
linear_acc = int8_mm(x_q, x_zero_point, q_weight_s8r_weight, 8)
linear_w_scale = weight_scale(q_weight_s8r_weight, 8)
linear_dequantize = dequantize(linear_acc, x_scale, None, linear_w_scale, q_bias, 'none', torch.float32)
linear_1_acc = int8_mm(x_q, x_zero_point, k_weight_s8r_weight, 8)
linear_1_w_scale = weight_scale(k_weight_s8r_weight, 8)
linear_1_dequantize = dequantize(linear_1_acc, x_scale, None, linear_1_w_scale, None, 'none', torch.float32)
mul = mul(linear_dequantize, linear_1_dequantize)
mul_quantize = quantize(mul, [8, 0, 0, 0, 0])
mul_q = getitem(mul_quantize, 0)
mul_scale = getitem(mul_quantize, 1)
mul_zero_point = getitem(mul_quantize, 2)
linear_2_acc = int8_mm(mul_q, mul_zero_point, up_weight_s8r_weight, 4)
linear_2_w_scale = weight_scale(up_weight_s8r_weight, 4)
linear_2_dequantize = dequantize(linear_2_acc, mul_scale, None, linear_2_w_scale, up_bias, 'gelu', torch.float32)""",
        )

    def test_fused(self) -> None:
        gm, _ = qfx.rewrite(qfx.trace(Shared(), torch.randn(2, 8)), CONFIG)
        self.assertExpectedInline(
            _calls(gm),
            """\
x_linears = linears(x, [q_weight_s8r_weight, k_weight_s8r_weight], [8, 8, 0, 0, 0, 8, 8, 0, 0, 0], [q_bias, None], [8, 0, 0, 0, 0], ['none', 'none'], torch.float32)
linear_int8 = getitem(x_linears, 0)
linear_1_int8 = getitem(x_linears, 1)
mul = mul(linear_int8, linear_1_int8)
linear_2_int8 = linear_dynamic(mul, up_weight_s8r_weight, [4, 8, 0, 0, 0], up_bias, [8, 0, 0, 0, 0], 'gelu', torch.float32)""",
        )


BITS, ROTATIONS = st.integers(2, 8), st.sampled_from([0, 16, 64])
ANY_AXES = st.sampled_from([qfx.PER_ROW, qfx.PER_TENSOR, qfx.PER_COLUMN])
CODES = st.builds(qfx.QSpec, BITS, st.booleans(), st.sampled_from([qfx.PER_ROW, qfx.PER_TENSOR]))
ONE_SCALE = st.builds(qfx.QSpec, BITS, st.just(True), ANY_AXES)
GROUPS = st.builds(
    qfx.QSpec, BITS, st.booleans(), st.just(qfx.PER_ROW), st.sampled_from([0, 64, 128])
)
SCHEMES = st.builds(qfx.Scheme, CODES, ONE_SCALE | GROUPS, st.just("float"), ROTATIONS) | st.builds(
    qfx.Scheme, st.none(), ONE_SCALE, st.just("float"), ROTATIONS
)
SCHEMES |= st.builds(qfx.Scheme, CODES | st.none(), PACKED, st.just("float"), ROTATIONS)
SIZES = st.sampled_from([1, 2, 3, 5, 7, 15, 16, 17, 31, 32, 33, 47, 64, 65, 128])


class OneLinear(nn.Module):
    def __init__(self, k: int, n: int, bias: bool, epilogue: str, shared: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(k, n, bias=bias), nn.Linear(k, n)
        self.epilogue, self.shared = ACTIVATIONS[epilogue].reference, shared

    def forward(self, x: Tensor) -> Tensor:
        y = self.epilogue(self.a(x))
        return y + self.b(x) if self.shared else y


@given(
    scheme=SCHEMES,
    m=st.sampled_from([0, 1, 2, 3, 13]),
    k=SIZES,
    n=SIZES,
    bias=st.booleans(),
    shared=st.booleans(),
    epilogue=st.sampled_from(list(ACTIVATIONS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_fused_and_canonical_give_the_same_bits(
    scheme: qfx.Scheme,
    m: int,
    k: int,
    n: int,
    bias: bool,
    shared: bool,
    epilogue: str,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    model = OneLinear(k, n, bias, epilogue, shared).to(dtype)
    x = torch.randn(m, k, dtype=dtype)
    gm = qfx.trace(model, x)
    config = qfx.Config(scheme=scheme, minimum_gain=0)
    (canonical, _), (fused, _) = (qfx.rewrite(gm, config, canonical=c) for c in (True, False))
    targets = {n.target for n in fused.graph.nodes}
    assert torch.ops.qfx.int8_mm.default not in targets
    with torch.no_grad():
        assert torch.equal(canonical(x), fused(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_forms_agree_and_are_close_to_float(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Block().to(dtype), torch.randn(2, 5, FEATURES, dtype=dtype)
    gm = qfx.trace(model, x)
    (canonical, plan), (fused, _) = (qfx.rewrite(gm, CONFIG, canonical=c) for c in (True, False))
    assert plan.quantized == 7
    with torch.no_grad():
        assert torch.equal(canonical(x), fused(x))
        assert qfx.sqnr(model(x), fused(x)) > 25


@pytest.mark.parametrize("leading", [(1,), (1, 1), (2, 5)])
def test_one_call_for_q_k_v_and_one_for_gate_up(leading: tuple[int, ...]) -> None:
    x = torch.randn(*leading, FEATURES)
    gm = qfx.trace(Block(), x)
    (canonical, _), (fused, _) = (qfx.rewrite(gm, CONFIG, canonical=c) for c in (True, False))
    shared = [n.target for n in canonical.graph.nodes if n.target is ops.quantize.default]
    called = [n.target for n in fused.graph.nodes if "qfx" in str(n.target)]
    assert len(shared) == 4 and called.count(ops.linears.default) == 2
    assert called.count(ops.linear_dynamic.default) == len(called) - 2 == 2
    with torch.no_grad():
        assert torch.equal(canonical(x), fused(x))


class WrittenBetween(nn.Module):
    """y = x W, x += 1, z = x W: the two matmuls see different values of one node."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        y = self.a(x)
        x.add_(1)
        return y + self.b(x)


def test_a_write_between_two_consumers_is_respected() -> None:
    model, x = WrittenBetween(), torch.randn(4, 8)
    gm, _ = qfx.rewrite(qfx.trace(model, x), CONFIG)
    with torch.no_grad():
        assert qfx.sqnr(model(x), gm(x)) > 30
    assert any(n.target == "add_" for n in gm.graph.nodes)


def test_the_given_graph_is_not_changed() -> None:
    gm = qfx.trace(Block(), torch.randn(2, 5, FEATURES))
    before = str(gm.graph)
    qfx.rewrite(gm, CONFIG)
    assert str(gm.graph) == before


@pytest.mark.parametrize("training", [False, True])
def test_n_that_the_capture_does_not_know_is_that_of_the_float_weight(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node for the product and the scales that belong together, and for the layout."""
    model, x = Shared(), torch.randn(2, 8)
    gm = qfx.trace(model, x)
    known, _ = qfx.rewrite(gm, CONFIG, training=training)
    monkeypatch.setattr("qfx.match.matching._shape_nk", lambda site: None)
    for canonical in (True, False):
        found, plan = qfx.rewrite(gm, CONFIG, canonical=canonical, training=training)
        assert plan.quantized == 3
        assert _calls(found).count(" = sym_size(") == 3
        with torch.set_grad_enabled(training):
            assert torch.equal(found(x), known(x))


def test_float_weights_are_left_behind() -> None:
    gm, _ = qfx.rewrite(qfx.trace(Shared(), torch.randn(2, 8)), CONFIG)
    floats = {name for name, t in gm.state_dict().items() if t.is_floating_point() and t.ndim > 1}
    assert not floats


def test_without_shapes_every_legal_site_is_quantized() -> None:
    gm, plan = qfx.rewrite(qfx.trace(Shared()))
    assert plan.quantized == 3
    assert "not predicted" in plan.entries[0].reason
    with torch.no_grad():
        gm(torch.randn(3, 8))


def test_constant_bias_after_the_matmul_in_graph_order() -> None:
    """`x @ w + b` of a symbolic trace reads b after the matmul."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b = nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.w + self.b

    model, x = Late(), torch.randn(3, 8)
    gm, _ = qfx.rewrite(qfx.trace(model, x), CONFIG)
    with torch.no_grad():
        assert qfx.sqnr(model(x), gm(x)) > 30


@pytest.mark.parametrize("given", ["program", "module", "trace"])
def test_exported_program_keeps_its_signature(given: str) -> None:
    model, x = Block(), torch.randn(2, 5, FEATURES)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    forms: Any = {"program": program, "module": program.module(), "trace": qfx.trace(program)}
    gm, plan = qfx.rewrite(forms[given], CONFIG)
    assert plan.quantized == 7
    with torch.no_grad():
        for n in (2, 7):
            x = torch.randn(n, 5, FEATURES)
            assert qfx.sqnr(model(x), gm(x)) > 25
    again = torch.export.export(gm, (x,))
    assert torch.equal(again.module()(x), gm(x))


def test_names_that_differ_by_a_dot_only() -> None:
    class Names(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
            self.fc_1 = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc_1(self.fc[1](self.fc[0](x)))

    model, x = Names(), torch.randn(4, 8)
    gm, _ = qfx.rewrite(qfx.trace(model, x), CONFIG)
    with torch.no_grad():
        assert qfx.sqnr(model(x), gm(x)) > 28


def test_bias_that_another_site_computes() -> None:
    class Chained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.b.weight, self.a(x[0]))

    model, x = Chained(), torch.randn(4, 8)
    gm, plan = qfx.rewrite(qfx.trace(model, x), CONFIG)
    assert plan.quantized == 2
    with torch.no_grad():
        assert qfx.sqnr(model(x), gm(x)) > 28


def test_leaf_modules_of_another_tracer_are_reported() -> None:
    _, plan = qfx.rewrite(fx.symbolic_trace(Shared()), CONFIG)
    assert plan.quantized == 0 and plan.total == 3
    assert "Linear is a leaf module of this graph" in plan.entries[0].reason
