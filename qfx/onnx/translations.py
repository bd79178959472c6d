"""One function for each operator that can be written as operators of ONNX. Its arguments are those
of the operator: values of the ONNX graph, numbers and strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qfx.onnx.convolutions import windows
from qfx.onnx.linears import finished, float_product, product
from qfx.onnx.opset import Value, as_float32, ints, ir, opset
from qfx.onnx.packed import PackedInitializer
from qfx.onnx.quantization import QuantizedRows, Rows, quantized, rotate
from qfx.ops.layout import Layout, each_layout

_FOUND = "qfx"  # what is known of the codes that `quantize` wrote, in the value's `meta`


@dataclass(frozen=True)
class Translations:
    """The translations of the operators, each a method of the operator's name. `weights`: "uint8"
    or "int8", the dtype of 8-bit codes of weights."""

    weights: str

    def rotate(self, x, factor, rotation, back=False):
        return _in_dtype_of(x, rotate(Rows.of(x), factor, rotation, back).value)

    def quantize(self, x, code, scale=None, zero_point=None, seed=None, factor=None):
        if seed is not None:
            raise NotImplementedError("qfx::quantize with a seed has no translation to ONNX")
        return _parts(quantized(Rows.of(x), code, scale, zero_point, factor))

    def linear(self, q, scale, zero_point, weight, layout, bias, activation, out_dtype):
        x = q.meta.get(_FOUND) or _rows_of(q, scale, zero_point, Layout(*layout).group)
        return finished(self._product(x, weight, layout), bias, activation, out_dtype)

    def linear_requantize(
        self, q, scale, zero_point, weight, layout, bias, activation, out_scale, out_zero_point,
        out_code,
    ):  # fmt: skip
        y = self.linear(q, scale, zero_point, weight, layout, bias, activation, ir().DataType.FLOAT)
        rows = Rows(y, (0,) * (len(q.shape) - 1), Layout(*layout).n)
        return _parts(quantized(rows, out_code, out_scale, out_zero_point))

    def linear_dynamic(self, x, weight, layout, bias, code, activation, out_dtype, factor=None):
        sums = self._product(quantized(Rows.of(x), code, factor=factor), weight, layout)
        return finished(sums, bias, activation, out_dtype)

    def linears(self, x, weight, layout, bias, code, activation, out_dtype, factor=None):
        rows = quantized(Rows.of(x), code, factor=factor)
        each = zip(weight, each_layout(layout), bias, activation, strict=True)
        return [finished(self._product(rows, w, n), b, act, out_dtype) for w, n, b, act in each]

    def linear_ste(
        self, x, w, bias, x_step, w_step, codes, weight, layout, code, seed, out_dtype, factor=None
    ):
        q, scale, zero_point = codes
        return self.linear(q, scale, zero_point, weight, layout, bias, "none", out_dtype)

    def linear_float(self, x, weight, layout, bias, activation, out_dtype):
        rows = Rows.of(x)
        packed = PackedInitializer(weight, Layout(*layout), rows.k)
        return finished(float_product(rows, packed), bias, activation, out_dtype)

    def im2col(self, x, kernel, stride, padding, dilation):
        return windows(x, kernel, stride, padding, dilation)

    def conv_dynamic(
        self, x, weight, layout, bias, kernel, stride, padding, dilation, code, activation,
        out_dtype, factor=None, residual=None,
    ):  # fmt: skip
        op, count = opset(), int(weight.shape[0]) if len(weight.shape) == 2 else 1
        split = {"axis": 1, "num_outputs": count}
        images = op.Split(as_float32(x), **split) if count > 1 else [as_float32(x)]
        taps = 1
        for size in kernel:
            taps *= size
        sums = []
        for group, image in enumerate(images):
            rows = windows(image, kernel, stride, padding, dilation)
            k = taps * int(x.shape[1]) // count
            found = quantized(Rows(rows, (0,) * (len(kernel) + 1), k), code, factor=factor)
            sums.append(self._product(found, weight, layout, group if count > 1 else None))
        y = sums[0] if count == 1 else op.Concat(*sums, axis=-1)
        if residual is None:
            return finished(y, bias, activation, out_dtype)
        y = finished(y, bias, "none", ir().DataType.FLOAT)
        return finished(op.Add(y, as_float32(residual)), None, activation, out_dtype)

    def _product(
        self, x: QuantizedRows, weight: Value, layout: Sequence[int], row: int | None = None
    ) -> Value:
        packed = PackedInitializer(weight, Layout(*layout), x.codes.k, row)
        return product(x, packed, self.weights)


def _in_dtype_of(x: Value, y: Value) -> Value:
    return y if x.dtype == ir().DataType.FLOAT else opset().Cast(y, to=int(x.dtype))


def _parts(x: QuantizedRows) -> tuple[Value, Value, Value]:
    """Returns the codes, scale float32 and zero point int32 as `qfx::quantize` returns them."""
    op, codes = opset(), x.codes.value
    codes.meta[_FOUND] = x
    shape = op.Concat(op.Shape(codes, end=-1), ints(1), axis=0)
    scale = x.scale if x.group else op.Expand(x.scale, shape)
    zero = op.Mul(scale, 0.0) if x.zero_point is None else x.zero_point
    zero = zero if x.group else op.Expand(zero, shape)
    return codes, scale, op.Cast(zero, to=int(ir().DataType.INT32))


def _rows_of(q: Value, scale: Value, zero_point: Value, group: int) -> QuantizedRows:
    """Returns the arguments of an operator as a quantized activation."""
    outer, k = (0,) * (len(q.shape) - 1), int(q.shape[-1])
    of_groups = group if scale.shape[-1] != 1 else 0
    return QuantizedRows(Rows(q, outer, k), scale, as_float32(zero_point), of_groups)
