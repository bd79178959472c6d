"""qfx: int8 for PyTorch as a compiler backend. `torch.compile(model, backend="qfx")`."""

import torch  # noqa: F401  (its libraries are loaded before our extension)

from qfx import nn, ops  # the operators, registered before anything uses them
from qfx.calibration.calibrating import calibrate
from qfx.dynamo_backend import qfx as backend
from qfx.graph.capture import trace
from qfx.match.spellings import register_matmul
from qfx.nn import prepare_binary, prepare_qat, quantize_
from qfx.ops.guard_counts import GuardCount, guard_counts
from qfx.ops.single_tensors import (
    Quantized,
    dequantize,
    quantization_error,
    quantize,
    quantize_dequantize_,
    sqnr,
)
from qfx.pipeline import rewrite
from qfx.plan.policy import Plan
from qfx.report.report import Report, explain
from qfx.values.config import Config
from qfx.values.recipe import Recipe, SiteRecipe
from qfx.values.scheme import PER_COLUMN, PER_ROW, PER_TENSOR, QSpec, Scheme
from qfx.weights.cache import invalidate

__all__ = [
    "PER_COLUMN",
    "PER_ROW",
    "PER_TENSOR",
    "Config",
    "GuardCount",
    "Plan",
    "QSpec",
    "Quantized",
    "Recipe",
    "Report",
    "Scheme",
    "SiteRecipe",
    "backend",
    "calibrate",
    "dequantize",
    "explain",
    "guard_counts",
    "invalidate",
    "nn",
    "ops",
    "prepare_binary",
    "prepare_qat",
    "quantization_error",
    "quantize",
    "quantize_",
    "quantize_dequantize_",
    "register_matmul",
    "rewrite",
    "sqnr",
    "trace",
]
__version__ = "0.2.0.dev0"
