"""The operators of ONNX, as onnxscript records them. The package is imported on first use."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, TypeAlias

Value: TypeAlias = Any  # of onnx_ir: a tensor of the graph that is being written
OPSET = 21  # the first one with 4-bit integers and with scales for blocks


@cache
def opset() -> Any:
    """Returns the operators of ONNX as functions on values. Raises ImportError if onnxscript is
    not installed."""
    return getattr(_onnxscript(), f"opset{OPSET}")


def ir() -> Any:
    """Returns the module of tensors, types and shapes of ONNX."""
    return _onnxscript().ir


def _onnxscript() -> Any:
    try:
        return import_module("onnxscript")
    except ImportError as error:
        raise ImportError(
            'qfx.onnx_translation_table needs the package onnxscript: pip install "qfx[onnx]"'
        ) from error


def ints(*numbers: int) -> Value:
    """Returns a constant int64 [count]."""
    return opset().Constant(value_ints=list(numbers))


def as_float32(x: Value) -> Value:
    """Returns x in float32, itself if it is."""
    types = ir().DataType
    return x if x.dtype == types.FLOAT else opset().Cast(x, to=int(types.FLOAT))
