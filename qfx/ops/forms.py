"""Forms: a table of the kinds of quantized linears, one row for each kind. All code that runs,
predicts or explains linears reads this table. `qfx.ops.lowering` lists the calls that a linear
consists of.

A form is determined by whether the activations are quantized and by how the weight is stored. Its
row says what the form supports: linears of a form without gradients stay float in training, and
linears of a form without a guard have no guard. The row also gives the reason. Operators are called
by the names of their arguments; the schemas in csrc/ops.cpp define the order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from qfx.host.gpu_build import has_kernel
from qfx.host.operators import schema
from qfx.ops.code import code_of
from qfx.ops.layout import Layout, layout_of
from qfx.values.scheme import PER_COLUMN, PER_TENSOR, Scheme

ops = torch.ops.qfx
CUDA_GROUP_MULTIPLE = 64  # of elements that share a scale on CUDA


class OperatorCall:
    """An operator that is called by argument names, with tensors or with nodes of a graph."""

    def __init__(self, operator: Any) -> None:
        arguments = schema(operator).arguments
        self.operator = operator
        self.names = tuple(argument.name for argument in arguments)
        self.required = sum(not argument.has_default_value() for argument in arguments)
        self.on_cuda = has_kernel(self.name, torch.device("cuda"))  # looked up once: calls are many

    @property
    def name(self) -> str:
        return str(self.operator.name()).removeprefix("qfx::")

    def arguments(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns the positional arguments of the operator, taken from `values` by name, without
        trailing optional ones that are None."""
        count = len(self.names)
        while count > self.required and values.get(self.names[count - 1]) is None:
            count -= 1
        given = [values[name] for name in self.names[: self.required]]
        return *given, *map(values.get, self.names[self.required : count])

    def __call__(self, values: Mapping[str, Any]) -> Any:
        return self.operator(*self.arguments(values))

    def lacking(self, device: torch.device) -> str | None:
        """Returns why the operator does not run on this device, or None."""
        has = has_kernel(self.name, device)
        return None if has else f"{self.name} has no kernel for {device.type}"


ROTATE = OperatorCall(ops.rotate.default)
QUANTIZE = OperatorCall(ops.quantize.default)
INT8_MM = OperatorCall(ops.int8_mm.default)
WEIGHT_SCALE = OperatorCall(ops.weight_scale.default)
DEQUANTIZE = OperatorCall(ops.dequantize.default)
LINEAR = OperatorCall(ops.linear.default)
DYNAMIC = OperatorCall(ops.linear_dynamic.default)
IM2COL = OperatorCall(ops.im2col.default)
CONV = OperatorCall(ops.conv_dynamic.default)
DEPTHWISE = OperatorCall(ops.conv_depthwise.default)
LINEARS = OperatorCall(ops.linears.default)
EXPERTS = OperatorCall(ops.linear_experts.default)
BLOCK = OperatorCall(ops.experts.default)
FLOAT = OperatorCall(ops.linear_float.default)
LSTM = OperatorCall(ops.lstm.default)
GRU = OperatorCall(ops.gru.default)
EXPERTS_STE = OperatorCall(ops.linear_experts_ste.default)
STE = OperatorCall(ops.linear_ste.default)
GUARDED = OperatorCall(ops.linear_guarded.default)
REQUANTIZE = OperatorCall(ops.linear_requantize.default)


@dataclass(frozen=True)
class Form:
    """One kind of quantized linears, a row of FORMS. `codes`: the activation is quantized.
    `x_groups`: with scales for groups of K. `low_bit`: the weight's codes are stored in fewer than
    8 bits. `gradient`: there are gradients to x and the bias, and with `trains_weight` also to the
    weight. `guards`: rows of x whose error may be too large can run in float. `gemm`: the linear is
    an exact int8 matmul and then a dequantization, which the canonical form has as separate
    operators. `name` is also the name under which costs are predicted."""

    name: str
    words: str
    codes: bool
    x_groups: bool = False
    low_bit: bool = False
    gradient: bool = False
    trains_weight: bool = False
    guards: bool = False
    gemm: bool = False

    @property
    def fused(self) -> OperatorCall:
        """The operator that computes the linear, from codes or else from x."""
        return LINEAR if self.codes else FLOAT

    def serves(self, scheme: Scheme) -> bool:
        x, layout = scheme.x, Layout(*layout_of(scheme.w, scheme.group, 0))
        grouped, gemm = x is not None and x.group != 0, x is not None and layout.one_scale
        mine = (self.codes, self.x_groups, self.low_bit, self.gemm)
        return mine == (x is not None, grouped, layout.low_bit, gemm)

    def lacking(self, scheme: Scheme, device: torch.device) -> str | None:
        """Returns why the form does not run this scheme on this device, or None."""
        if device.type != "cuda" or not scheme.group:
            return self.fused.lacking(device)
        if self.x_groups:
            return f"{self.fused.name} on cuda has groups of weights only, not of activations"
        if scheme.group % CUDA_GROUP_MULTIPLE:
            return f"{self.fused.name} on cuda has groups of multiples of {CUDA_GROUP_MULTIPLE}"
        return self.fused.lacking(device)


_INT8 = Form(
    name="int8",
    words="activations and weights in int8",
    codes=True,
    gradient=True,
    trains_weight=True,
    guards=True,
    gemm=True,
)
_GROUPS = Form(
    name="groups",
    words="weights with groups or zero points",
    codes=True,
    gradient=True,
    guards=True,
)
_PACKED = Form(
    name="packed",
    words="weights stored in fewer bits",
    codes=True,
    low_bit=True,
    gradient=True,
)
FORMS = (
    _INT8,
    _GROUPS,
    replace(_GROUPS, name="x_groups", words="activations with groups", x_groups=True),
    _PACKED,
    replace(
        _PACKED,
        name="x_packed",
        words=f"{_PACKED.words} and activations with groups",
        x_groups=True,
    ),
    Form(
        name="packed_weight_only",
        words="float activations times weights stored in fewer bits",
        codes=False,
        low_bit=True,
    ),
    Form(
        name="weight_only",
        words="float activations times int8 weights",
        codes=False,
    ),
)


def form_of(scheme: Scheme) -> Form:
    """Returns the row of FORMS for a scheme; every valid scheme has one."""
    for form in FORMS:
        if form.serves(scheme):
            return form
    raise AssertionError(f"no form serves {scheme}")


def why_no_gradient(scheme: Scheme, weight_trains: bool) -> str | None:
    """Returns why linears of this scheme stay float if gradients are recorded; None if they can be
    int8."""
    form = form_of(scheme)
    if not form.gradient:
        return f"{scheme}: {form.words} have no gradient"
    if weight_trains and not form.trains_weight:
        return f"{scheme}: {form.words} have no gradient to the weight, which trains"
    return None


def why_not_guarded(scheme: Scheme) -> str | None:
    form = form_of(scheme)
    if not form.guards:
        return f"{form.words} have no bound"
    return "its scale is static" if scheme.calibrated else None


def of_scheme(scheme: Scheme, n: Any, rotation: int) -> dict[str, Any]:
    """Returns the arguments of operators that are determined by a scheme, for a weight of n rows.
    `rotation`: the block of K in use, `Scheme.block`."""
    layout = {"layout": layout_of(scheme.w, scheme.group, n)}
    return layout if scheme.x is None else {**layout, "code": code_of(scheme.x, rotation)}


def ste_code(scheme: Scheme, rotation: int) -> list[int]:
    """Returns the argument `code` of linear_ste and linear_experts_ste: the five numbers of the
    `Code` of x, then the bits of w and whether w has one scale for the matrix."""
    assert scheme.x is not None
    w = scheme.w
    return [*code_of(scheme.x, rotation), w.bits, int(w.axes in (PER_TENSOR, PER_COLUMN))]


def of_weight(packed: Any) -> dict[str, Any]:
    """Returns the arguments of operators that come from a packed weight, by name. `packed`: a
    `qfx.weights.cache.Packed`, or the nodes of a graph that compute its parts."""
    return {"weight": packed.weight, "error": packed.error}
