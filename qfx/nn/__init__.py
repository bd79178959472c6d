"""Modules and functions over the operators, for models that are trained to be quantized."""

from qfx.nn import functional
from qfx.nn.lsq import LSQLinear
from qfx.nn.qat import prepare_qat

__all__ = ["LSQLinear", "functional", "prepare_qat"]
