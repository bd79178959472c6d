"""Modules that use the operators of qfx: int8 linears and convolutions, and 1-bit linears, to serve
or train models."""

from qfx.nn import functional
from qfx.nn import weight_attributes as weight_attributes
from qfx.nn import weight_rules as weight_rules
from qfx.nn.binary import BinaryLinear
from qfx.nn.conv import Conv
from qfx.nn.convert_model import convert
from qfx.nn.embedding import Embedding
from qfx.nn.experts import Experts
from qfx.nn.linear import Linear
from qfx.nn.lsq import LSQLinear
from qfx.nn.lsq_conv import LSQConv
from qfx.nn.qat import prepare_binary, prepare_qat
from qfx.nn.quantize_model import quantize_
from qfx.nn.recurrent import GRU, LSTM, GRUCell, LSTMCell
from qfx.nn.sign_linear import SignLinear

__all__ = [
    "GRU",
    "LSTM",
    "BinaryLinear",
    "Conv",
    "Embedding",
    "Experts",
    "GRUCell",
    "LSQConv",
    "LSQLinear",
    "LSTMCell",
    "Linear",
    "SignLinear",
    "convert",
    "functional",
    "prepare_binary",
    "prepare_qat",
    "quantize_",
]
