"""Packed weights as initializers of an ONNX model: codes, scales and zero points, dequantized by
DequantizeLinear to the matrix w^ [K, N]. Equations (Q5) (Q14).

The translation of a node sees the shape of a packed weight and not its values, which the exporter
adds after it has translated all nodes. So initializers are lazy: they unpack the weight when they
are first read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from qfx.onnx.opset import Value, ir, opset
from qfx.ops.header import MINIMUMS, ZERO_POINTS
from qfx.ops.layout import Layout
from qfx.ops.lowbit_packing import lowbit_size

_MIDDLE = 128  # between the codes of uint8 and int8


class Unpacked(NamedTuple):
    """The values of a weight: codes int8 [N, K], scale float32, zero_point int32 and minimum
    float32 [N, S]."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor
    minimum: Tensor


@dataclass(frozen=True)
class PackedInitializer:
    """A packed weight [N, K] among the inputs of a graph. `row`: which one of a stack of weights,
    or None."""

    value: Value
    layout: Layout
    k: int
    row: int | None = None

    @property
    def scales(self) -> int:
        """The number of scales of each output."""
        return int(self.layout.scales(self.k))

    @property
    def has_minimums(self) -> bool:
        return self._shift == MINIMUMS

    @property
    def has_zero_points(self) -> bool:
        return self._shift == ZERO_POINTS

    @property
    def _shift(self) -> int:
        n, bits, group, _, shifted = self.layout
        if not shifted or not self.layout.low_bit:
            return ZERO_POINTS if shifted else 0
        size = lowbit_size(n, self.k, bits, group, ZERO_POINTS)  # the size says which it has
        return ZERO_POINTS if self.value.shape[-1] == size else MINIMUMS

    def unpacked(self) -> Unpacked:
        """Unpacks the weight. Raises ValueError if the graph computes it."""
        held = self.value.const_value
        if held is None:
            raise ValueError(
                f"qfx.onnx_translation_table: the packed weight {self.value.name} is computed in "
                "the graph, as in training: export a model that qfx.quantize_ or qfx.convert made"
            )
        packed = torch.from_numpy(np.array(held.numpy()))
        packed = packed if self.row is None else packed[self.row].clone()
        return Unpacked(*torch.ops.qfx.unpack_weight(packed, list(self.layout), self.k))

    def constant(
        self, read: Callable[[Unpacked], Tensor], shape: Sequence[int], dtype: str = "FLOAT"
    ) -> Value:
        """Returns what `read` makes of the unpacked weight, as a constant of this shape and
        ONNX dtype."""
        onnx = ir()

        def made() -> Any:
            values = read(self.unpacked()).contiguous().numpy()
            return onnx.tensor(values, dtype=onnx.DataType[dtype])

        lazy = onnx.LazyTensor(made, onnx.DataType[dtype], onnx.Shape(shape), cache=True)
        return opset().Constant(value=lazy)


def dequantized(weight: PackedInitializer, dtype: str) -> Value:
    """Returns w^ [K, N] in float32, without minimums, for a matmul with codes. `dtype`: "uint8" or
    "int8", that of the codes if each output has one scale."""
    if weight.layout.scale_group:
        return dequantized_for_floats(weight)
    n, k = weight.layout.n, weight.k
    given = [
        weight.constant(lambda w: _coded(w.codes.t(), dtype), (k, n), dtype.upper()),
        weight.constant(lambda w: w.scale[:, 0], (n,)),
    ]
    if weight.has_zero_points or dtype == "uint8":
        zero_point = weight.constant(
            lambda w: _coded(w.zero_point[:, 0], dtype), (n,), dtype.upper()
        )
        given.append(zero_point)
    return opset().DequantizeLinear(*given, axis=1)


def dequantized_for_floats(weight: PackedInitializer) -> Value:
    """Returns w^ [K, N] in float32, without minimums, for a matmul with float activations, or of a
    weight with scales for groups of K.

    The codes are [N, K], and there is a Transpose behind them. Without it ONNX Runtime (1.31) runs
    an integer matmul that does not know of groups, or one that quantizes float activations.
    """
    n, k, shape = weight.layout.n, weight.k, (weight.layout.n, weight.scales)
    dtype = "INT4" if weight.layout.bits == 4 else "INT8"
    given = [
        weight.constant(lambda w: w.codes, (n, k), dtype),
        weight.constant(lambda w: w.scale, shape),
    ]
    if weight.layout.shift:
        given.append(weight.constant(lambda w: _coded(w.zero_point, "int8"), shape, dtype))
    op, size = opset(), weight.layout.scale_group or k
    return op.Transpose(op.DequantizeLinear(*given, axis=1, block_size=size), perm=[1, 0])


def _coded(codes: Tensor, dtype: str) -> Tensor:
    if dtype == "int8":
        return codes.to(torch.int8)
    return (codes.to(torch.int16) + _MIDDLE).to(torch.uint8)
