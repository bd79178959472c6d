"""Operators of earlier versions, which programs exported with those versions call. Each raises an
error that says so when it runs. Earlier versions stored scales apart from the packed weight, this
version stores them in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

_CODES = "Tensor q, Tensor scale, Tensor zero_point, Tensor packed"
_END = "Tensor? bias, str activation, ScalarType out_dtype"
_TRANSFORM = "Tensor? factor=None, int rotation=0"
_SPEC = "int bits, bool symmetric"
_LOWBIT = "Tensor packed, SymInt n, int w_bits, int w_group"
_THREE = "(Tensor, Tensor, Tensor)"
_SCHEMAS = (
    f"quantize_groups(Tensor x, int group, {_SPEC}, {_TRANSFORM}) -> {_THREE}",
    f"quantize_static(Tensor x, Tensor scale, Tensor? zero_point, {_SPEC}, {_TRANSFORM}) -> "
    f"{_THREE}",
    f"int8_linear({_CODES}, Tensor w_scale, {_END}) -> Tensor",
    f"int8_linear_groups({_CODES}, Tensor w_scale, Tensor? w_zero, {_END}) -> Tensor",
    f"int8_linear_requantize({_CODES}, Tensor w_scale, Tensor? bias, str activation, Tensor "
    f"out_scale, Tensor? out_zero_point, {_SPEC}) -> {_THREE}",
    f"int8_weight_linear(Tensor x, Tensor packed, Tensor w_scale, {_END}) -> Tensor",
    f"int8_linear_dynamic(Tensor x, Tensor packed, Tensor w_scale, Tensor? bias, int[] axes, "
    f"{_SPEC}, str activation, ScalarType out_dtype, {_TRANSFORM}) -> Tensor",
    f"int8_linear_groups_dynamic(Tensor x, Tensor packed, Tensor w_scale, Tensor? w_zero, Tensor? "
    f"bias, int[] axes, int group, {_SPEC}, str activation, ScalarType out_dtype, {_TRANSFORM}) "
    "-> Tensor",
    f"lowbit_linear({_CODES}, SymInt n, int w_bits, int w_group, {_END}) -> Tensor",
    f"lowbit_linear_dynamic(Tensor x, {_LOWBIT}, Tensor? bias, int[] axes, int group, {_SPEC}, str "
    f"activation, ScalarType out_dtype, {_TRANSFORM}) -> Tensor",
    f"lowbit_weight_linear(Tensor x, {_LOWBIT}, {_END}) -> Tensor",
)
NAMES = tuple(schema.partition("(")[0] for schema in _SCHEMAS)
_LIBRARY = torch.library.Library("qfx", "FRAGMENT")


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any) -> NoReturn:
        raise RuntimeError(
            f"qfx::{name} is an operator of an earlier qfx, with which this program was exported. "
            "Export the model again with this version: torch.export.export(model, inputs)"
        )

    return refuse


for _schema, _name in zip(_SCHEMAS, NAMES, strict=True):
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_name, _refusal(_name), "CompositeExplicitAutograd")
