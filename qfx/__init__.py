"""qfx: int8 for PyTorch as a compiler backend. `torch.compile(model, backend="qfx")`."""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch  # (its libraries are loaded before our extension)

from qfx import nn, ops  # the operators, registered before anything uses them
from qfx.nn import convert, prepare_binary, prepare_qat, quantize_
from qfx.nn.chunked_loss import chunked_loss
from qfx.nn.save_in_int8 import save_in_int8
from qfx.nn.stored_modules import LISTENERS
from qfx.ops.guard_counts import GuardCount, guard_counts
from qfx.ops.single_tensors import (
    Quantized,
    dequantize,
    quantization_error,
    quantize,
    quantize_dequantize_,
    sqnr,
)
from qfx.values.config import Config
from qfx.values.recipe import Recipe
from qfx.values.rounding import Rounding
from qfx.values.scheme import PER_COLUMN, PER_ROW, PER_TENSOR, QSpec, Scheme
from qfx.values.site_recipe import PinnedProduct, SiteRecipe
from qfx.weights.cache import invalidate

if TYPE_CHECKING:
    from qfx.calibration.calibrate_model import calibrate
    from qfx.calibration.pin_plan import pin
    from qfx.cost.kernels import Kernels, kernels
    from qfx.dynamo_backend.backend import qfx as backend
    from qfx.files.loading import load
    from qfx.files.saving import save
    from qfx.generate.compile_model import compile_for_generate
    from qfx.graph.capture import trace
    from qfx.io.cmake import cmake_prefix_path
    from qfx.match.spellings import register_matmul
    from qfx.onnx.table import onnx_translation_table
    from qfx.pipeline import rewrite
    from qfx.plan.plan import Plan
    from qfx.report.explain_model import explain
    from qfx.report.report import Report
    from qfx.report.saved_tensors import saved_tensors

__all__ = [
    "PER_COLUMN",
    "PER_ROW",
    "PER_TENSOR",
    "Config",
    "GuardCount",
    "Kernels",
    "PinnedProduct",
    "Plan",
    "QSpec",
    "Quantized",
    "Recipe",
    "Report",
    "Rounding",
    "Scheme",
    "SiteRecipe",
    "backend",
    "calibrate",
    "chunked_loss",
    "cmake_prefix_path",
    "compile_for_generate",
    "convert",
    "dequantize",
    "explain",
    "guard_counts",
    "invalidate",
    "kernels",
    "load",
    "nn",
    "onnx_translation_table",
    "ops",
    "pin",
    "prepare_binary",
    "prepare_qat",
    "quantization_error",
    "quantize",
    "quantize_",
    "quantize_dequantize_",
    "register_matmul",
    "rewrite",
    "save",
    "save_in_int8",
    "saved_tensors",
    "sqnr",
    "trace",
]
__version__ = "0.3.0"

# Imported on first use, because they compile, take a second to import, or use files: name ->
# (module, name there).
_LAZY = {
    "Kernels": ("cost.kernels", "Kernels"),
    "Plan": ("plan.policy", "Plan"),
    "Report": ("report.report", "Report"),
    "backend": ("dynamo_backend.backend", "qfx"),
    "calibrate": ("calibration.calibrate_model", "calibrate"),
    "cmake_prefix_path": ("io.cmake", "cmake_prefix_path"),
    "compile_for_generate": ("generate.compile_model", "compile_for_generate"),
    "explain": ("report.explain_model", "explain"),
    "kernels": ("cost.kernels", "kernels"),
    "load": ("files.loading", "load"),
    "onnx_translation_table": ("onnx.table", "onnx_translation_table"),
    "pin": ("calibration.pin_plan", "pin"),
    "register_matmul": ("match.spellings", "register_matmul"),
    "rewrite": ("pipeline", "rewrite"),
    "save": ("files.saving", "save"),
    "saved_tensors": ("report.saved_tensors", "saved_tensors"),
    "trace": ("graph.capture", "trace"),
}


_PRETRAINED = ("transformers.modeling_utils", "PreTrainedModel")


def _attach_to_transformers(model: torch.nn.Module) -> None:
    """Makes save_pretrained write the int8 weights of a transformers model. Does nothing for other
    models. Such a model exists only in a process that has already imported transformers."""
    classes = {each for module in model.modules() for each in type(module).__mro__}
    if _PRETRAINED not in {(each.__module__, each.__name__) for each in classes}:
        return
    try:
        attached = import_module("qfx.hf.attach")
    except ImportError as why:  # raised for earlier versions of transformers
        warnings.warn(
            f"qfx: {why}. What save_pretrained writes, from_pretrained does not read, "
            "and fills the linears with random weights. qfx.save keeps the model",
            stacklevel=4,
        )
    else:
        attached.attach(model)


LISTENERS.append(_attach_to_transformers)


def __getattr__(name: str) -> Any:
    if name in ("hf", "generate"):
        return import_module(f"qfx.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'qfx' has no attribute {name!r}")
    module, called = _LAZY[name]
    globals()[name] = found = getattr(import_module(f"qfx.{module}"), called)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
