"""Linears in ONNX: codes and a packed weight become a MatMul of DequantizeLinears, its scales, bias
and activation function. Equations (E1) (E2) (E3) (E4) (W1) (W3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from qfx.onnx.opset import Value, as_float32, ints, ir, opset
from qfx.onnx.packed import PackedInitializer, Unpacked, dequantized, dequantized_for_floats
from qfx.onnx.quantization import QuantizedRows, Rows, as_floats

ACTIVATIONS: Mapping[str, Callable[[Value], Value]] = {
    "none": lambda v: v,
    "relu": lambda v: opset().Relu(v),
    "gelu": lambda v: opset().Gelu(v),
    "gelu_tanh": lambda v: opset().Gelu(v, approximate="tanh"),
    "silu": lambda v: opset().Mul(v, opset().Sigmoid(v)),
    "quick_gelu": lambda v: opset().Mul(v, opset().Sigmoid(opset().Mul(v, 1.702))),
    "hardswish": lambda v: opset().HardSwish(v),
    "relu6": lambda v: opset().Clip(v, 0.0, 6.0),
}


def finished(y: Value, bias: Value | None, activation: str, out_dtype: Any) -> Value:
    """Returns act(y + bias) in `out_dtype`, a type of ONNX. (E1) (E2)"""
    op = opset()
    if bias is not None:
        y = op.Add(y, as_float32(bias))
    y = ACTIVATIONS[activation](y)
    return y if out_dtype == ir().DataType.FLOAT else op.Cast(y, to=int(out_dtype))


def product(x: QuantizedRows, weight: PackedInitializer, weights: str) -> Value:
    """Returns the product of quantized x [..., K] and a weight, float32 [..., N]. `weights`: the
    `dtype` of `dequantized`."""
    op = opset()
    if x.group:
        return float_product(x.floats(), weight)
    codes = as_floats(x.codes)
    sums = op.MatMul(codes.value, dequantized(weight, weights))
    sums = _plus_minimums(sums, codes, weight)
    if x.zero_point is not None:  # (q - z) w = q w - z (the sum of w)
        n, group = weight.layout.n, weight.layout.scale_group
        of_columns = weight.constant(lambda w: _sums_of_columns(w, group), (n,))
        sums = op.Sub(sums, op.Mul(x.zero_point, of_columns))
    return op.Mul(sums, x.scale)


def float_product(x: Rows, weight: PackedInitializer) -> Value:
    """Returns the product of x float32 [..., K] and a weight, float32 [..., N]."""
    y = opset().MatMul(x.value, dequantized_for_floats(weight))
    return _plus_minimums(y, x, weight)


def _plus_minimums(y: Value, x: Rows, weight: PackedInitializer) -> Value:
    """Adds the minimums of groups times the sums of x over the groups. (E4)"""
    op, shape = opset(), (weight.scales, weight.layout.n)
    if not weight.has_minimums:
        return y
    sums = op.ReduceSum(x.blocks(weight.layout.scale_group), ints(-1), keepdims=0)
    return op.Add(y, op.MatMul(sums, weight.constant(lambda w: w.minimum.t(), shape)))


def _sums_of_columns(weight: Unpacked, group: int) -> Tensor:
    """Returns sum_k w^ [N], rounded once. `group`: the elements that share a scale, 0 for all.
    (Q14)"""
    k = weight.codes.shape[1]
    each = [t.double().repeat_interleave(group or k, 1)[:, :k] for t in weight[1:]]
    scale, zero_point, minimum = each
    return ((weight.codes - zero_point) * scale + minimum).sum(1).float()
