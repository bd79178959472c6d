"""The quantization of activations in ONNX: the codes of `qfx::quantize`, bit for bit if K is not
rotated. Equations (R1) (Q1) (Q2) (Q3) (Q6).

A row is divided by its scale before QuantizeLinear, whose own scale is 1. So QuantizeLinear and
DequantizeLinear have constant scales, which runtimes recognize. With scales for rows ONNX Runtime
(1.31) computes wrong products or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from qfx.onnx.opset import Value, as_float32, ints, ir, opset
from qfx.ops.code import Code
from qfx.ops.quantize import SMALLEST_SCALE, code_range
from qfx.ops.rotation import rotated


class Rows(NamedTuple):
    """An activation float32 [..., K]. `outer`: a 0 for each axis before K, as Reshape takes sizes
    that stay."""

    value: Value
    outer: tuple[int, ...]
    k: int

    @classmethod
    def of(cls, x: Value) -> Rows:
        """Returns an argument of a translated operator as rows."""
        return cls(as_float32(x), (0,) * (len(x.shape) - 1), int(x.shape[-1]))

    def columns(self, begin: int, end: int) -> Rows:
        """Returns the columns begin..end."""
        if (begin, end) == (0, self.k):
            return self
        cut = opset().Slice(self.value, ints(begin), ints(end), ints(-1), ints(1))
        return Rows(cut, self.outer, end - begin)

    def blocks(self, size: int) -> Value:
        """Returns blocks of `size` elements of K, [..., ceil(K / size), size], the last one filled
        up with zeros."""
        op, count = opset(), -(-self.k // size)
        padding = ints(*self.outer, 0, *self.outer, count * size - self.k)
        padded = self.value if count * size == self.k else op.Pad(self.value, padding)
        return op.Reshape(padded, ints(*self.outer, count, size))

    def joined(self, blocks: Value, count: int) -> Rows:
        """Inverts `blocks`. `count`: the number of elements of all blocks of a row."""
        flat = opset().Reshape(blocks, ints(*self.outer, count))
        return Rows(flat, self.outer, count).columns(0, self.k)


class QuantizedRows(NamedTuple):
    """A quantized activation: codes int8 [..., K], their scale float32 and zero point float32 [...,
    1], or [..., G] for groups of `group` elements. The zero point of symmetric codes is None."""

    codes: Rows
    scale: Value
    zero_point: Value | None
    group: int = 0

    def floats(self) -> Rows:
        """Returns x^ of codes in groups. (Q5)

        There is no DequantizeLinear: ONNX Runtime (1.31) would move it past the Reshapes and then
        refuse its own graph.
        """
        op, one = opset(), ints(-1)
        codes = self.codes._replace(value=as_float32(self.codes.value))
        scale, count = op.Unsqueeze(self.scale, one), -(-codes.k // self.group) * self.group
        blocks = codes.blocks(self.group)
        if self.zero_point is not None:
            blocks = op.Sub(blocks, op.Unsqueeze(self.zero_point, one))
        return codes.joined(op.Mul(blocks, scale), count)


def rotate(rows: Rows, factor: Value | None, rotation: int, back: bool = False) -> Rows:
    """Returns R (x * factor), or factor * (R^T x). R is a product with a constant matrix for each
    size of blocks. (R1)"""
    op = opset()
    if factor is not None and not back:
        rows = rows._replace(value=op.Mul(rows.value, factor))
    if rotation:
        rows = _rotated(rows, rotation, back)
    if factor is not None and back:
        rows = rows._replace(value=op.Mul(rows.value, factor))
    return rows


def _rotated(rows: Rows, rotation: int, back: bool) -> Rows:
    op, parts = opset(), []
    begin, block = 0, rotation
    while block:
        end = rows.k & -block
        if end > begin:
            part = rows.columns(begin, end)
            turned = op.MatMul(part.blocks(block), _matrix(block, back))
            parts.append(part.joined(turned, part.k).value)
        begin, block = end, block // 2
    whole = parts[0] if len(parts) == 1 else op.Concat(*parts, axis=-1)
    return rows._replace(value=whole)


def _matrix(block: int, back: bool) -> Value:
    """Returns the matrix of a block, whose signs take a byte each in a file."""
    op, onnx = opset(), ir()
    eye = torch.eye(block, dtype=torch.float32, device="cpu")
    signs = rotated(eye, block, back).sign().to(torch.int8)
    stored = op.Constant(value=onnx.tensor(signs.numpy()))
    return op.Mul(op.Cast(stored, to=int(onnx.DataType.FLOAT)), block**-0.5)


def quantized(
    x: Rows,
    code: Sequence[int],
    scale: Value | None = None,
    zero_point: Value | None = None,
    factor: Value | None = None,
) -> QuantizedRows:
    """Quantizes x [..., K]. `code`: the five numbers of a `Code`. `scale`, `zero_point`: static
    ones. The codes of rows with a NaN or an infinity are not those of (Q4)."""
    op, how = opset(), Code(*code)
    rows = rotate(x, factor, how.rotation)
    if scale is not None:
        used = op.Max(scale, SMALLEST_SCALE)
        zero = None if zero_point is None else _in_range(as_float32(zero_point), how)
        steps = _in_range(_steps(rows.value, used, zero), how)
        return QuantizedRows(rows._replace(value=_codes(steps)), used, zero)
    values = rows.blocks(how.group) if how.group else rows.value
    used, zero = _scales(values, how, len(rows.outer) + 1)
    steps = _steps(values, used, zero)
    steps = steps if how.bits == 8 else _in_range(steps, how)
    if not how.group:
        return QuantizedRows(rows._replace(value=_codes(steps)), used, zero)
    whole = op.Cast(op.Round(steps), to=int(ir().DataType.INT8))
    codes = rows.joined(whole, -(-rows.k // how.group) * how.group)
    beside = [t if t is None else op.Squeeze(t, ints(-1)) for t in (used, zero)]
    return QuantizedRows(codes, beside[0], beside[1], how.group)


def _scales(v: Value, how: Code, axes: int) -> tuple[Value, Value | None]:
    """Returns the scales and the zero points of the rows of v, or those of all rows together, where
    v has this number of axes."""
    op, (qmin, qmax) = opset(), code_range(how.bits, bool(how.symmetric))
    over = ints(*range(axes)) if how.per_tensor else ints(-1)
    if how.symmetric:
        largest = op.ReduceMax(op.Abs(v), over, keepdims=1)
        return op.Max(op.Div(largest, float(qmax)), SMALLEST_SCALE), None  # (Q1)
    low = op.Min(op.ReduceMin(v, over, keepdims=1), 0.0)
    high = op.Max(op.ReduceMax(v, over, keepdims=1), 0.0)
    steps = float(qmax - qmin)
    scale = op.Max(op.Sub(op.Div(high, steps), op.Div(low, steps)), SMALLEST_SCALE)  # (Q2)
    zero = op.Sub(float(qmin), op.Round(op.Mul(low, op.Div(1.0, scale))))
    return scale, _in_range(zero, how)


def _steps(v: Value, scale: Value, zero_point: Value | None) -> Value:
    """Returns what (Q3) clamps, where the last rounding is left to QuantizeLinear."""
    op = opset()
    steps = op.Mul(v, op.Div(1.0, scale))
    return steps if zero_point is None else op.Add(op.Round(steps), zero_point)


def _in_range(steps: Value, how: Code) -> Value:
    return opset().Clip(steps, *map(float, code_range(how.bits, bool(how.symmetric))))


def _codes(steps: Value) -> Value:
    return opset().QuantizeLinear(steps, *_one())


def as_floats(codes: Rows) -> Rows:
    """Returns int8 codes in float32."""
    return codes._replace(value=opset().DequantizeLinear(codes.value, *_one()))


def _one() -> tuple[Value, Value]:
    """Returns the scale 1 and the zero point 0."""
    op, onnx = opset(), ir()
    zero = onnx.tensor(0, dtype=onnx.DataType.INT8)
    return op.Constant(value_float=1.0), op.Constant(value=zero)
