"""Lowering: which operator calls a linear of a scheme consists of, and in which order.

`lower` is called by the canonical form (`qfx.rewriting.canonical`), which makes nodes of the steps,
and by modules (`qfx.nn.frozen`), which run them. The inputs and outputs of steps have names: the
names of the operators' arguments, and in addition

    carrier                          x, if gradients flow to it; steps that quantize read x
    static_scale, static_zero_point  for the quantization of x, if they are not computed from x
    code_of_turned                   the code of x if K was transformed before
    ste_code, gradient_seed          linear_ste's codes of x and w, and the seed of its roundings

The values that depend on the scheme are those of `of_scheme`. The result is `y`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from qfx.ops.forms import (
    DEQUANTIZE,
    DYNAMIC,
    FLOAT,
    GUARDED,
    INT8_MM,
    LINEAR,
    QUANTIZE,
    ROTATE,
    STE,
    WEIGHT_SCALE,
    OperatorCall,
    form_of,
)
from qfx.values.scheme import Scheme

Values = Mapping[str, Any]  # tensors, nodes of a graph or numbers
CODES = ("q", "scale", "zero_point")


@dataclass(frozen=True, eq=False)
class LoweringStep:
    """One operator call of a linear. `gives`: the names of its results. `stem`: the name of its
    node in graphs. `named`: for arguments whose value has another name: this name, or several names
    of which the argument is the list, or None for an absent argument."""

    call: OperatorCall
    gives: tuple[str, ...]
    stem: str
    named: Mapping[str, str | tuple[str, ...] | None] = field(default_factory=dict)
    sources: tuple[str | tuple[str, ...] | None, ...] = field(init=False)  # of each argument

    def __post_init__(self) -> None:
        sources = tuple(self.named.get(name, name) for name in self.call.names)
        object.__setattr__(self, "sources", sources)

    def run(self, values: Values) -> Any:
        """Calls the operator and returns its result: the same as `call(read(values))`, but
        faster."""
        call = self.call
        given = [values.get(s) if type(s) is str else _found(s, values) for s in self.sources]
        while len(given) > call.required and given[-1] is None:
            given.pop()
        return call.operator(*given)

    def read(self, values: Values) -> Values:
        """Returns the values by the names of the operator's arguments. `values`: by the names of
        the steps."""
        if not self.named:
            return values
        return {**values, **{name: _found(source, values) for name, source in self.named.items()}}


def _found(source: str | tuple[str, ...] | None, values: Values) -> Any:
    if source is None:
        return None
    return values.get(source) if isinstance(source, str) else [values[name] for name in source]


class Lowered(NamedTuple):
    """The steps of a linear. `shared`: steps that linears with the same input have in common;
    `own`: the others."""

    shared: tuple[LoweringStep, ...]
    own: tuple[LoweringStep, ...]


@dataclass(frozen=True)
class Circumstance:
    """The circumstances of a linear. `turned`: x and w are transformed along K, equation (R1).
    `trains`: gradients are recorded. `guarded`: rows of x whose error may be too large run in
    float. `canonical`: use operators that do one thing each, which fusion later combines; otherwise
    use as few operators as possible, `on_cuda` or on the CPU."""

    turned: bool
    trains: bool = False
    guarded: bool = False
    canonical: bool = False
    on_cuda: bool = False


_STATIC = {"scale": "static_scale", "zero_point": "static_zero_point"}
_OF_TURNED = {**_STATIC, "code": "code_of_turned", "factor": None}
_ROTATE = LoweringStep(ROTATE, ("x",), "rotate")
_QUANTIZE = LoweringStep(QUANTIZE, CODES, "quantize", _STATIC)
_QUANTIZE_TURNED = LoweringStep(QUANTIZE, CODES, "quantize", _OF_TURNED)
_GEMM = (
    LoweringStep(INT8_MM, ("acc",), "acc"),
    LoweringStep(WEIGHT_SCALE, ("col_scale",), "w_scale"),
    LoweringStep(DEQUANTIZE, ("y",), "dequantize", {"q": "acc", "zero_point": None}),
)
_LINEAR, _DYNAMIC, _FLOAT, _GUARDED = (
    (LoweringStep(call, ("y",), "int8"),) for call in (LINEAR, DYNAMIC, FLOAT, GUARDED)
)
_TRAINED = {"x": "carrier", "x_step": "static_scale", "w_step": None, "codes": CODES}
_STE = (
    LoweringStep(STE, ("y",), "int8", {**_TRAINED, "code": "ste_code", "seed": "gradient_seed"}),
)


def lower(scheme: Scheme, circumstance: Circumstance) -> Lowered:
    """Returns the operator calls that compute a linear of this scheme, from x to y. Calls of a form
    without gradients are the same whether or not gradients are recorded."""
    form = form_of(scheme)
    if circumstance.guarded:
        return Lowered((), _GUARDED)
    if not form.codes:
        return Lowered((_ROTATE,) * circumstance.turned, _FLOAT)
    if circumstance.canonical:
        own = _STE if circumstance.trains else _GEMM if form.gemm else _LINEAR
        return Lowered((*(_ROTATE,) * circumstance.turned, _QUANTIZE_TURNED), own)
    if circumstance.trains:
        return Lowered((_QUANTIZE,), _STE)
    if scheme.calibrated or (circumstance.on_cuda and not DYNAMIC.on_cuda):
        return Lowered((_QUANTIZE,), _LINEAR)
    return Lowered((), _DYNAMIC)
