"""Storage: packs weights that are quantized by a `QSpec`, and unpacks their codes and scales.

`quantized` runs on tensors, and on `fx.Proxy` to emit the same operators into a graph. `group` in
this file is the number of elements of K that are summed separately, which may also be required by
scales of x; 0 for all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from qfx.host.tensors import has_values
from qfx.ops.code import Code
from qfx.ops.header import NONE, ZERO_POINTS
from qfx.ops.layout import Layout, layout_of
from qfx.ops.weight import packed_size
from qfx.values.scheme import PER_COLUMN, PER_TENSOR, QSpec

ops = torch.ops.qfx
aten = torch.ops.aten


class PackedTriple(NamedTuple):
    """A packed quantized weight, and the `triple` that `quantize` returned for it: codes, scale and
    zero point, with groups of K as rows if these have their own scales."""

    weight: Any
    triple: Any


class Values(NamedTuple):
    """A quantized weight in a layout that does not depend on the processor: `codes` int8 [N, K],
    `scale` float32 and `zero_point` int32 of the shape `scale_shape`. `minimum`: for groups whose
    values are (code - zero_point) scale + minimum. Equations (Q5) (Q14)."""

    codes: Any
    scale: Any
    zero_point: Any = None
    minimum: Any = None


def quantized(
    w_nk: Any, spec: QSpec, group: int, rotation: int, k: int | None, codes: Any
) -> PackedTriple:
    """Quantizes the float weight w_nk [N, K] by `spec` and packs it. `codes`: int8 [N, K] that are
    used instead of the codes rounded to nearest, or None. K must be known if it is cut into groups
    with scales. Equations (Q1) (Q3) (E3) (Q14)."""
    if spec.group:
        assert k is not None
        return _by_group(w_nk, spec, rotation, k, codes)
    per_tensor = spec.axes in (PER_TENSOR, PER_COLUMN)  # (R2)
    code = Code(spec.bits, int(spec.symmetric), int(per_tensor), 0, rotation)
    triple = ops.quantize.default(w_nk, list(code))
    triple = triple if codes is None else (codes, triple[1], triple[2])
    shift = None if spec.symmetric else triple[2]
    return PackedTriple(
        ops.pack_weight.default(triple[0], triple[1], shift, None, 8, group), triple
    )


def _by_group(w_nk: Any, spec: QSpec, rotation: int, k: int, codes: Any) -> PackedTriple:
    """Quantizes and packs a weight whose groups of K each have a scale and a zero point: each group
    is quantized like a row."""
    padding = -k % spec.group
    if rotation:
        w_nk = ops.rotate.default(aten.to.dtype(w_nk, torch.float32), None, rotation)
    padded = aten.constant_pad_nd.default(w_nk, [0, padding])
    rows = torch.reshape(padded, (-1, spec.group))
    if spec.packed:
        triple = quantize_to_half(rows, spec.bits, spec.symmetric)
    else:
        triple = ops.quantize.default(rows, list(Code(spec.bits, int(spec.symmetric))))
    if codes is None:
        codes = aten.slice.Tensor(_as_rows(triple[0], k + padding, w_nk), 1, 0, k)
    else:
        whole = aten.constant_pad_nd.default(codes, [0, padding])
        triple = (torch.reshape(whole, (-1, spec.group)), triple[1], triple[2])
    groups, bits = (k + padding) // spec.group, spec.bits if spec.packed else 8
    scale = _as_rows(triple[1], groups, w_nk)
    shift = None if spec.symmetric else _as_rows(triple[2], groups, w_nk)
    return PackedTriple(
        ops.pack_weight.default(codes, scale, shift, None, bits, spec.group), triple
    )


def _as_rows(values: Any, columns: int, w_nk: Any) -> Any:
    """Returns values as [N, columns]. Without columns the weight has no elements, and its shape is
    used."""
    if columns:
        return torch.reshape(values, (-1, columns))
    return aten.to.other(w_nk, values)


def quantize_to_half(rows: Any, bits: int, symmetric: bool) -> tuple[Any, Any, Any]:
    """Quantizes rows as `quantize` does, but with scales that are rounded to bfloat16. Equation
    (Q14)."""
    code = list(Code(bits, int(symmetric)))
    found = ops.quantize.default(rows, code)
    half = aten.to.dtype(aten.to.dtype(found[1], torch.bfloat16), torch.float32)
    scale, zero = torch.reshape(half, (-1,)), torch.reshape(found[2], (-1,))
    given = (scale,) if symmetric else (scale, zero)
    return ops.quantize.default(rows, code, *given)[0], half, found[2]


def packed_values(values: Values, spec: QSpec, group: int) -> Any:
    """Packs the codes, scales, zero points and minimums of a weight."""
    codes, scale, zero, minimum = values
    if not spec.packed:
        return ops.pack_weight(codes, scale, zero, None, 8, group or spec.group)
    if minimum is not None:
        some = zero is None or (has_values(minimum) and bool((minimum != 0).any()))
        zero, minimum = (None, minimum.float()) if some else (zero, None)
    zero = None if zero is None else zero.int()
    return ops.pack_weight(codes, scale.float(), zero, minimum, spec.bits, spec.group)


def values_of(weight: Any, spec: QSpec, group: int, n: int, k: int) -> Values:
    """Unpacks the codes, scales, zero points and minimums of a packed weight [n, k]."""
    codes, scale, zero, minimum = ops.unpack_weight(weight, layout_of(spec, group, n), k)
    scale = scale.reshape(scale_shape(spec, group, n, k))
    if spec.symmetric:
        return Values(codes, scale)
    return Values(codes, scale, zero, minimum if spec.packed else None)


def scale_shape(spec: QSpec, group: int, n: int, k: int) -> tuple[int, ...]:
    """Returns the shape of the scale of `Values`, and of the zero point if there is one."""
    if not (spec.grouped or group):
        return (n,)
    return n, -(-k // spec.group) if spec.group else 1


def stored_bytes(spec: QSpec, group: int, n: int, k: int) -> int:
    """Returns the number of bytes of a packed weight [n, k] on the CPU. A call with a few rows of x
    reads all of them."""
    shift = NONE if spec.symmetric else ZERO_POINTS
    return packed_size(Layout(*layout_of(spec, group, n)), k, shift)
