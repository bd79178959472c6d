"""qfx: int8 for PyTorch as a compiler backend. `torch.compile(model, backend="qfx")`."""

import torch  # noqa: F401  (its libraries are loaded before our extension)

from qfx import nn, ops  # the operators, registered before anything uses them
from qfx.api import rewrite
from qfx.calibration.calibrate import calibrate
from qfx.capture import trace
from qfx.config import Config
from qfx.dynamo import qfx as backend
from qfx.functions import (
    Quantized,
    dequantize,
    quantization_error,
    quantize,
    quantize_dequantize_,
)
from qfx.guard import GuardCount, guard_counts
from qfx.nn import prepare_binary, prepare_qat, quantize_
from qfx.plan import Plan
from qfx.recipe import Recipe, SiteRecipe
from qfx.report import Report, explain, sqnr
from qfx.scheme import PER_COLUMN, PER_ROW, PER_TENSOR, QSpec, Scheme
from qfx.spellings import register_matmul
from qfx.weights import invalidate

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
