"""Forms: which operators run a linear of a scheme. One row for each; all that runs, predicts or
explains linears reads this table.

A form is chosen by whether the activations are quantized and by how the weight is stored. In its
row stand the operators for each circumstance, None where there is none: the site then stays float,
or is not guarded, for the reason that the row gives. Operators are called by the names of their
arguments, whose order the schemas in csrc/ops.cpp say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from qfx.host.operators import schema
from qfx.ops.storage import GROUPS, PACKED, ROWS, Storage, storage_of
from qfx.values.gpu_build import has_kernel
from qfx.values.scheme import PER_COLUMN, PER_TENSOR, QSpec, Scheme

ops = torch.ops.qfx
CUDA_GROUP_MULTIPLE = 64  # of elements that share a scale there
_TRANSFORM = ("factor", "rotation")  # of K (R1): the last arguments, left out where nothing is done


class Call:
    """An operator that is called by name, with tensors or with nodes of a graph."""

    def __init__(self, operator: Any) -> None:
        names = tuple(argument.name for argument in schema(operator).arguments)
        self.operator = operator
        self.names = names
        self.plain = names[:-2] if names[-2:] == _TRANSFORM else names
        self.on_cuda = has_kernel(self.name, torch.device("cuda"))  # asked once: calls are many

    @property
    def name(self) -> str:
        return str(self.operator.name()).removeprefix("qfx::")

    def arguments(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        turned = values.get("factor") is not None or bool(values.get("rotation"))
        return tuple([values[name] for name in (self.names if turned else self.plain)])

    def __call__(self, values: Mapping[str, Any]) -> Any:
        return self.operator(*self.arguments(values))

    def lacking(self, device: torch.device) -> str | None:
        """Why it does not run there, or None."""
        has = has_kernel(self.name, device)
        return None if has else f"{self.name} has no kernel for {device.type}"


@dataclass(frozen=True)
class Form:
    """One row. `fused` computes the linear: of codes where the activation is quantized (`codes`),
    else of x. `dynamic` quantizes x itself; `trained` has gradients, of a weight too where that may
    train (`trains_weight`); `guarded` runs rows in float whose error may be too large. `gemm`: its
    products are exact int8 matmuls, which the canonical form shows apart from their dequantization.
    `x_groups`: groups of K have scales of x. The name is also that of its kind of cost."""

    name: str
    words: str
    codes: bool
    storage: Storage
    fused: Call
    dynamic: Call | None = None
    trained: Call | None = None
    guarded: Call | None = None
    trains_weight: bool = False
    gemm: bool = False
    x_groups: bool = False

    def serves(self, scheme: Scheme) -> bool:
        x, storage = scheme.x, storage_of(scheme.w, scheme.group)
        grouped = x is not None and x.group != 0
        return (self.codes, self.x_groups) == (x is not None, grouped) and self.storage is storage

    def lacking(self, scheme: Scheme, device: torch.device) -> str | None:
        """Why it does not run this scheme there, or None."""
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
    storage=ROWS,
    fused=Call(ops.int8_linear.default),
    dynamic=Call(ops.int8_linear_dynamic.default),
    trained=Call(ops.int8_linear_ste.default),
    guarded=Call(ops.int8_linear_guarded.default),
    trains_weight=True,
    gemm=True,
)
_GROUPS = Form(
    name="groups",
    words="weights with groups or zero points",
    codes=True,
    storage=GROUPS,
    fused=Call(ops.int8_linear_groups.default),
    dynamic=Call(ops.int8_linear_groups_dynamic.default),
    trained=Call(ops.int8_linear_groups_ste.default),
    guarded=Call(ops.int8_linear_groups_guarded.default),
)
_PACKED = Form(
    name="packed",
    words="weights stored in fewer bits",
    codes=True,
    storage=PACKED,
    fused=Call(ops.lowbit_linear.default),
    dynamic=Call(ops.lowbit_linear_dynamic.default),
    trained=Call(ops.lowbit_linear_ste.default),
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
        storage=PACKED,
        fused=Call(ops.lowbit_weight_linear.default),
    ),
    Form(
        name="weight_only",
        words="float activations times int8 weights",
        codes=False,
        storage=ROWS,
        fused=Call(ops.int8_weight_linear.default),
    ),
)
QUANTIZE = Call(ops.quantize.default)
QUANTIZE_STATIC = Call(ops.quantize_static.default)
QUANTIZE_GROUPS = Call(ops.quantize_groups.default)


def form_of(scheme: Scheme) -> Form:
    """The row that serves a scheme; every legal scheme has one."""
    for form in FORMS:
        if form.serves(scheme):
            return form
    raise AssertionError(f"no form serves {scheme}")


def why_no_gradient(scheme: Scheme, weight_trains: bool) -> str | None:
    """Why sites of this scheme stay float where gradients are recorded, or None."""
    form = form_of(scheme)
    if form.trained is None:
        return f"{scheme}: {form.words} have no gradient"
    if weight_trains and not form.trains_weight:
        return f"{scheme}: {form.words} have no gradient to the weight, which trains"
    return None


def why_not_guarded(scheme: Scheme) -> str | None:
    form = form_of(scheme)
    if form.guarded is None:
        return f"{form.words} have no bound"
    return "its scale is static" if scheme.calibrated else None


def quantizing(spec: QSpec) -> Call:
    """What makes codes of an activation."""
    if spec.group:
        return QUANTIZE_GROUPS
    return QUANTIZE_STATIC if spec.static else QUANTIZE


def of_spec(spec: QSpec) -> dict[str, Any]:
    """The arguments that say how an activation is quantized."""
    axes = list(spec.axes)
    return {"axes": axes, "group": spec.group, "bits": spec.bits, "symmetric": spec.symmetric}


def of_weight(packed: Any) -> dict[str, Any]:
    """Those of a packed weight: `qfx.weights.cache.Packed`, or its names in a graph."""
    weight = {"packed": packed.blocks, "w_scale": packed.scale, "w_zero": packed.zero_point}
    return {**weight, "error": packed.error}


def of_scheme(scheme: Scheme) -> dict[str, Any]:
    """The arguments that a scheme gives to the operators of its form."""
    axes = PER_TENSOR if scheme.w.axes == PER_COLUMN else scheme.w.axes
    weight = {"w_bits": scheme.w.bits, "w_axes": list(axes), "w_group": scheme.w.group}
    return weight if scheme.x is None else {**weight, **of_spec(scheme.x)}
