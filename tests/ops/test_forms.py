"""The table of forms, and the storage of weights: every scheme has a row, and what a row says is
true."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import qfx
from qfx import PER_COLUMN, PER_ROW, PER_TENSOR, QSpec, Scheme
from qfx.cost.workloads import KINDS
from qfx.host.operators import schema
from qfx.ops.code import Code
from qfx.ops.forms import (
    DYNAMIC,
    FLOAT,
    FORMS,
    GUARDED,
    LINEAR,
    QUANTIZE,
    REQUANTIZE,
    STE,
    OperatorCall,
    form_of,
    of_scheme,
    ste_code,
    why_no_gradient,
    why_not_guarded,
)
from qfx.ops.layout import Layout, layout_of
from qfx.ops.packing import Packing, parts_of
from qfx.ops.storage import packed_values, scale_shape, stored_bytes, values_of
from tests.lib.pairs import every
from tests.lib.strategies import PACKED

GROUPS = st.sampled_from([0, 32, 64, 128])
WEIGHTS = st.builds(QSpec, st.integers(2, 8), st.booleans(), st.just(PER_ROW), GROUPS) | st.builds(
    QSpec, st.integers(2, 8), st.just(True), st.sampled_from([PER_TENSOR, PER_COLUMN])
)
WEIGHTS |= PACKED
INPUTS = (
    st.none()
    | st.builds(QSpec, st.integers(2, 8), st.booleans(), st.sampled_from([PER_ROW, PER_TENSOR]))
    | st.builds(QSpec, st.integers(2, 8), st.booleans(), st.just(PER_ROW), GROUPS)
)


def _legal(x: QSpec | None, w: QSpec) -> bool:
    try:
        Scheme(x=x, w=w)
    except ValueError:
        return False
    return True


SCHEMES = st.tuples(INPUTS, WEIGHTS).filter(lambda xw: _legal(*xw)).map(lambda xw: Scheme(*xw))


@given(SCHEMES)
def test_one_row_serves_a_scheme(scheme: Scheme) -> None:
    assert [form for form in FORMS if form.serves(scheme)] == [form_of(scheme)]
    layout, form = Layout(*layout_of(scheme.w, scheme.group, 1)), form_of(scheme)
    assert form.gemm == (layout.one_scale and scheme.x is not None)
    assert form.low_bit == layout.low_bit == scheme.w.packed


@given(SCHEMES, st.integers(1, 40), st.integers(1, 300))
def test_a_packed_weight_gives_back_what_it_holds(scheme: Scheme, n: int, k: int) -> None:
    """Codes in their range, scales of the shape that is said, all as it went in."""
    spec, group = scheme.w, scheme.group
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(n * k))
    weight = parts_of(w, Packing(spec, group=group), {}, k)["weight"]
    assert len(weight) == stored_bytes(spec, group, n, k)
    values = values_of(weight, spec, group, n, k)
    assert values.scale.shape == scale_shape(spec, group, n, k)
    assert (values.zero_point is None) == spec.symmetric
    assert values.codes.dtype == torch.int8
    assert values.codes.int().abs().max() <= 2 ** (spec.bits - 1)
    assert torch.equal(packed_values(values, spec, group), weight)


@given(SCHEMES, st.integers(1, 40))
def test_a_scheme_gives_operators_their_arguments(scheme: Scheme, n: int) -> None:
    """A layout with n rows; of quantized activations a code, and one with the numbers of w."""
    given = of_scheme(scheme, n, 16)
    assert given["layout"] == layout_of(scheme.w, scheme.group, n)
    assert ("code" in given) == form_of(scheme).codes
    if scheme.x is not None:
        code, x = Code(*given["code"]), scheme.x
        assert (code.bits, code.symmetric, code.group) == (x.bits, x.symmetric, x.group)
        assert (code.per_tensor, code.rotation) == (x.axes == PER_TENSOR and not x.group, 16)
        whole = scheme.w.axes in (PER_TENSOR, PER_COLUMN)
        assert ste_code(scheme, 16) == [*code, scheme.w.bits, whole]


@pytest.mark.parametrize("call", [QUANTIZE, LINEAR, DYNAMIC, FLOAT, STE, GUARDED, REQUANTIZE],
                         ids=lambda call: call.name)  # fmt: skip
def test_arguments_are_in_the_order_of_the_schema(call: OperatorCall) -> None:
    """The last that need not be given are left out where they are None."""
    wanted = [argument.name for argument in schema(call.operator).arguments]
    given: dict[str, Any] = {argument: argument for argument in wanted}
    assert list(call.arguments(given)) == wanted
    for last in range(call.required, len(wanted)):
        some = {**given, **dict.fromkeys(wanted[last:])}
        assert list(call.arguments(some)) == wanted[:last]
    if "scale" in wanted[call.required :]:  # those before the last that is given stay
        assert call.arguments({**given, "scale": None})[wanted.index("scale")] is None
    assert call.name == str(schema(call.operator).name).removeprefix("qfx::")


@pytest.mark.parametrize("bits, axes", every([3, 7, 8], [PER_ROW, PER_TENSOR]))
def test_activations_are_quantized_as_the_scheme_says(bits: int, axes: tuple[int, ...]) -> None:
    """In graphs and in modules: as many levels of x as there are codes."""
    spec = QSpec(bits, symmetric=False, axes=axes)
    model, x = nn.Linear(64, 8).eval(), torch.linspace(-1, 1, 4 * 64).reshape(4, 64)
    config = qfx.Config(scheme=Scheme(x=spec), minimum_gain=0)
    gm, _ = qfx.rewrite(qfx.trace(model, x), config, canonical=True)
    (call,) = gm.graph.find_nodes(op="call_function", target=torch.ops.qfx.quantize.default)
    assert call.args[1:] == ([bits, 0, int(axes == PER_TENSOR), 0, 0],)
    model.weight.data = torch.eye(8, 64)  # the first features of x^
    values = qfx.nn.Linear.from_float(model, Scheme(x=spec, w=QSpec(axes=PER_TENSOR)))(x)
    wanted = qfx.dequantize(qfx.quantize(x, spec))[:, :8]
    assert (values - model.bias - wanted).abs().max() < 0.02


@pytest.mark.parametrize("scheme", [Scheme(x=None), Scheme(), Scheme(w=QSpec(bits=4, group=64)),
    Scheme(x=QSpec(group=32)), Scheme(w=QSpec(bits=4, group=64, packed=True)),
    Scheme(x=None, w=QSpec(bits=5, group=32, packed=True))])  # fmt: skip
def test_a_factor_without_a_rotation_counts_in_every_form(scheme: Scheme) -> None:
    linear, x = nn.Linear(64, 8), torch.randn(4, 64)
    factor = tuple(1 + i / 64 for i in range(64))
    recipe = qfx.SiteRecipe("", 0, 8, 64, scheme, factor=factor)
    module = qfx.nn.Linear.from_float(linear, recipe)
    wanted = x @ module.weight.dequantize().t() + linear.bias
    assert qfx.sqnr(wanted, module(x)) > 30
    with torch.no_grad():  # by other operators
        assert qfx.sqnr(wanted, module(x)) > 30


@given(SCHEMES)
def test_reasons_are_there_where_operators_are_not(scheme: Scheme) -> None:
    form = form_of(scheme)
    assert (why_no_gradient(scheme, False) is None) == form.gradient
    assert (why_no_gradient(scheme, True) is None) == form.trains_weight
    assert (why_not_guarded(scheme) is None) == form.guards


@pytest.mark.parametrize("scheme", ["w8a8", "w8", "w8a8-groups", "w4a8", "w4"])
def test_a_form_without_a_kernel_there_stays_float(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = form_of(qfx.values.config.PRESETS[scheme]).fused.name
    has = qfx.host.operators.has_kernel
    monkeypatch.setattr(
        "qfx.host.operators.has_kernel", lambda op, key: op != f"qfx::{name}" and has(op, key)
    )
    model, x = nn.Linear(64, 8).eval(), torch.randn(4, 64)
    _, plan = qfx.rewrite(qfx.trace(model, x), qfx.Config(scheme=scheme, minimum_gain=0))
    assert plan.quantized == 0 and f"{name} has no kernel for cpu" in plan.entries[0].reason


def test_the_cost_of_every_form_is_measured() -> None:
    assert [form.name for form in FORMS if form.name not in KINDS] == []


def test_rows_are_told_apart_by_name() -> None:
    names = [row.name for row in FORMS]
    assert len(set(names)) == len(names)
