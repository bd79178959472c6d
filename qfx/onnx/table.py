"""onnx_translation_table: the translations of the operators, which `torch.onnx.export` takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from qfx.onnx.opset import opset
from qfx.onnx.translations import Translations
from qfx.ops.registry import REFERENCES

WEIGHTS = ("uint8", "int8")


def onnx_translation_table(weights: str = "uint8") -> dict[Any, Callable[..., Any]]:
    """Returns the `custom_translation_table` for `torch.onnx.export`: operator of qfx -> function
    that writes it as operators of ONNX.

        program = torch.export.export(qfx.quantize_(model), (x,))
        table = qfx.onnx_translation_table()
        onnx = torch.onnx.export(program, custom_translation_table=table, opset_version=21)

    The result needs opset 21. `weights`: the dtype of 8-bit codes of weights. "uint8" gives exact
    sums in ONNX Runtime on every processor. "int8" is faster on x86 processors with VNNI, and wrong
    on those without it, where sums of two products are cut off at 16 bits.

    Raises ImportError without onnxscript, and ValueError for other `weights`. The export raises
    `torch.onnx.OnnxExporterError` for an operator without a translation, and names it.
    """
    if weights not in WEIGHTS:
        raise ValueError(
            f"qfx.onnx_translation_table: weights is {weights!r}, not one of {WEIGHTS}"
        )
    opset()  # raises if onnxscript is missing
    translations = Translations(weights)
    return {
        getattr(torch.ops.qfx, name).default: _function(getattr(translations, name, _refuse(name)))
        for name in REFERENCES
    }


def _function(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that does the same, because the exporter writes an attribute to it."""

    @wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        return method(*arguments, **named)

    return call


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(*arguments: Any, **named: Any) -> Any:
        raise NotImplementedError(
            f"qfx::{name} has no translation to ONNX: name the modules that call it in "
            "qfx.Config(skip=[...]), so that they stay float"
        )

    return refuse
