"""Modules over the operators: int8 and 1-bit linears, for models that are served or trained."""

from qfx.nn import functional
from qfx.nn.binary import BinaryLinear
from qfx.nn.linear import Linear
from qfx.nn.lsq import LSQLinear
from qfx.nn.qat import prepare_binary, prepare_qat
from qfx.nn.quantized import quantize_

__all__ = [
    "BinaryLinear",
    "LSQLinear",
    "Linear",
    "functional",
    "prepare_binary",
    "prepare_qat",
    "quantize_",
]
