"""Forms: which operators run a linear of a scheme. One row for each; all that runs, predicts or
explains linears reads this table.

A form is chosen by whether the activations are quantized and by how the weight is stored. In its
row stand the operators for each circumstance, None where there is none: the site then stays float,
or is not guarded, for the reason that the row gives. Operators are called by the names of their
arguments, whose order the schemas in csrc/ops.cpp say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from qfx.host.operators import schema
from qfx.ops.storage import GROUPS, ROWS, Storage, storage_of
from qfx.values.gpu_build import has_kernel
from qfx.values.scheme import PER_COLUMN, PER_TENSOR, QSpec, Scheme

ops = torch.ops.qfx
_TRANSFORM = ("factor", "rotation")  # of K (R1): the last arguments, left out where nothing is done


class Call:
    """An operator that is called by name, with tensors or with nodes of a graph."""

    def __init__(self, operator: Any) -> None:
        names = tuple(argument.name for argument in schema(operator).arguments)
        self.operator = operator
        self.names = names
        self.plain = names[:-2] if names[-2:] == _TRANSFORM else names

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
    else of x. `dynamic` quantizes x itself; `trained` has gradients; `guarded` runs rows in float
    whose error may be too large. `gemm`: its products are exact int8 matmuls, which the canonical
    form shows apart from their dequantization. The name is also that of its kind of cost."""

    name: str
    words: str
    codes: bool
    storage: Storage
    fused: Call
    dynamic: Call | None = None
    trained: Call | None = None
    guarded: Call | None = None
    gemm: bool = False

    def serves(self, scheme: Scheme) -> bool:
        return self.codes == (scheme.x is not None) and self.storage is storage_of(scheme.w)


FORMS = (
    Form(
        name="int8",
        words="activations and weights in int8",
        codes=True,
        storage=ROWS,
        fused=Call(ops.int8_linear.default),
        dynamic=Call(ops.int8_linear_dynamic.default),
        trained=Call(ops.int8_linear_ste.default),
        guarded=Call(ops.int8_linear_guarded.default),
        gemm=True,
    ),
    Form(
        name="groups",
        words="weights with groups or zero points",
        codes=True,
        storage=GROUPS,
        fused=Call(ops.int8_linear_groups.default),
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


def form_of(scheme: Scheme) -> Form:
    """The row that serves a scheme; every legal scheme has one."""
    for form in FORMS:
        if form.serves(scheme):
            return form
    raise AssertionError(f"no form serves {scheme}")


def why_no_gradient(scheme: Scheme) -> str | None:
    """Why sites of this scheme stay float where gradients are recorded, or None."""
    form = form_of(scheme)
    return None if form.trained else f"{scheme}: {form.words} have no gradient"


def why_not_guarded(scheme: Scheme) -> str | None:
    form = form_of(scheme)
    if form.guarded is None:
        return f"{form.words} have no bound"
    return "its scale is static" if scheme.calibrated else None


def quantizing(spec: QSpec) -> Call:
    """What makes codes of an activation."""
    return QUANTIZE_STATIC if spec.static else QUANTIZE


def of_spec(spec: QSpec) -> dict[str, Any]:
    """The arguments that say how an activation is quantized."""
    return {"axes": list(spec.axes), "bits": spec.bits, "symmetric": spec.symmetric}


def of_weight(packed: Any) -> dict[str, Any]:
    """Those of a packed weight: `qfx.weights.cache.Packed`, or its names in a graph."""
    weight = {"packed": packed.blocks, "w_scale": packed.scale, "w_zero": packed.zero_point}
    return {**weight, "error": packed.error}


def of_scheme(scheme: Scheme) -> dict[str, Any]:
    """The arguments that a scheme gives to the operators of its form."""
    axes = PER_TENSOR if scheme.w.axes == PER_COLUMN else scheme.w.axes
    weight = {"w_bits": scheme.w.bits, "w_axes": list(axes)}
    return weight if scheme.x is None else {**weight, **of_spec(scheme.x)}
