"""qfx: int8 for PyTorch as a compiler backend. `torch.compile(model, backend="qfx")`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch  # noqa: F401  (its libraries are loaded before our extension)

from qfx import nn, ops  # the operators, registered before anything uses them
from qfx.nn import convert, prepare_binary, prepare_qat, quantize_
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
    from qfx.calibration.calibrating import calibrate
    from qfx.calibration.pinning import pin
    from qfx.cost.kernels import Kernels, kernels
    from qfx.dynamo_backend import qfx as backend
    from qfx.graph.capture import trace
    from qfx.match.spellings import register_matmul
    from qfx.pipeline import rewrite
    from qfx.plan.plan import Plan
    from qfx.report.report import Report, explain

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
    "convert",
    "dequantize",
    "explain",
    "guard_counts",
    "invalidate",
    "kernels",
    "nn",
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
    "sqnr",
    "trace",
]
__version__ = "0.2.0.dev0"

# What compiles, and takes a second to import: where it is, and what it is called there.
_WHEN_ASKED_FOR = {
    "Kernels": ("cost.kernels", "Kernels"),
    "Plan": ("plan.policy", "Plan"),
    "Report": ("report.report", "Report"),
    "backend": ("dynamo_backend", "qfx"),
    "calibrate": ("calibration.calibrating", "calibrate"),
    "explain": ("report.report", "explain"),
    "kernels": ("cost.kernels", "kernels"),
    "pin": ("calibration.pinning", "pin"),
    "register_matmul": ("match.spellings", "register_matmul"),
    "rewrite": ("pipeline", "rewrite"),
    "trace": ("graph.capture", "trace"),
}


def __getattr__(name: str) -> Any:
    if name not in _WHEN_ASKED_FOR:
        raise AttributeError(f"module 'qfx' has no attribute {name!r}")
    module, called = _WHEN_ASKED_FOR[name]
    globals()[name] = found = getattr(import_module(f"qfx.{module}"), called)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHEN_ASKED_FOR})
