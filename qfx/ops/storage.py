"""Storage: how the codes of a weight and their scales lie in memory. One row for each way.

The functions run on tensors, and on `fx.Proxy` to emit the same operators into a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from qfx.host.tensors import has_values
from qfx.ops.lowbit_packing import NONE, ZERO_POINTS, lowbit_size
from qfx.ops.weight import packed_size
from qfx.values.scheme import PER_COLUMN, PER_TENSOR, QSpec

ops = torch.ops.qfx
aten = torch.ops.aten


class Stored(NamedTuple):
    """A quantized weight: its parts, and codes, scale and zero point as `quantize` returns them."""

    parts: dict[str, Any]
    triple: Any


class Values(NamedTuple):
    """What a weight's codes are and mean, in no layout of a processor: int8 [N, K], and float32 and
    int32 of the shape `Storage.scales`. `minimum`: of groups whose values are (code - zero_point)
    scale + minimum. (Q5) (Q14)"""

    codes: Any
    scale: Any
    zero_point: Any = None
    minimum: Any = None


@dataclass(frozen=True)
class Storage:
    """`holds(spec, group)`: of which weights; `group`: the elements of K that are added up by
    themselves, be it for scales of x, 0 for all. `quantized(w_nk, spec, group, rotation, k, codes)`
    makes them from float, with `codes` in the place of the nearest where they are not None;
    `pack(values, spec, group)` from Values, its parts by name, which `unpack(parts, spec, n, k)`
    gives back. `scales(spec, n, k)`: the shape of the scale, and of the zero point where there is
    one; `parts(spec)`: the names of the tensors that it makes; `bytes(spec, group, n, k)`: how many
    they are together, which a call of few rows reads."""

    name: str
    holds: Callable[[QSpec, int], bool]
    quantized: Callable[[Any, QSpec, int, int, int | None, Any], Stored]
    pack: Callable[[Values, QSpec, int], dict[str, Any]]
    unpack: Callable[[Mapping[str, Any], QSpec, int, int], Values]
    scales: Callable[[QSpec, int, int], tuple[int, ...]]
    parts: Callable[[QSpec], tuple[str, ...]]
    bytes: Callable[[QSpec, int, int, int], int]
    cuts_k: bool = False  # into groups, so K has to be known


def _rows(w_nk: Any, spec: QSpec, group: int, rotation: int, k: int | None, codes: Any) -> Stored:
    """One scale for each row, or for all. (Q1) (Q3)"""
    axes = list(PER_TENSOR if spec.axes == PER_COLUMN else spec.axes)
    turned = (None, rotation) if rotation else ()
    triple = ops.quantize.default(w_nk, axes, spec.bits, True, *turned)
    triple = triple if codes is None else (codes, triple[1], triple[2])
    blocks, scale = ops.pack_weight.default(triple[0]), torch.reshape(triple[1], (-1,))
    return Stored({"blocks": blocks, "scale": scale}, triple)


def _groups(w_nk: Any, spec: QSpec, group: int, rotation: int, k: int | None, codes: Any) -> Stored:
    """One scale, and zero point, for each group of a row, [N, G] column by column, or for each row,
    [N, 1]. (E3)"""
    assert k is not None
    size = spec.group or max(k, 1)
    padding = -k % size
    if rotation:
        w_nk = ops.rotate.default(aten.to.dtype(w_nk, torch.float32), None, rotation)
    padded = aten.constant_pad_nd.default(w_nk, [0, padding])
    rows = torch.reshape(padded, (-1, size))
    triple = ops.quantize.default(rows, [1], spec.bits, spec.symmetric)
    if codes is None:
        codes = aten.slice.Tensor(_as_rows(triple[0], k + padding, w_nk), 1, 0, k)
    else:
        whole = aten.constant_pad_nd.default(codes, [0, padding])
        triple = (torch.reshape(whole, (-1, size)), triple[1], triple[2])
    names = ("scale",) if spec.symmetric else ("scale", "zero_point")
    parts = {"blocks": ops.pack_weight.default(codes, group)}
    for i, name in enumerate(names, 1):
        rows_g = _as_rows(triple[i], (k + padding) // size, w_nk)
        parts[name] = torch.t(aten.contiguous.default(torch.t(rows_g)))
    return Stored(parts, triple)


def _packed(w_nk: Any, spec: QSpec, group: int, rotation: int, k: int | None, codes: Any) -> Stored:
    """The same in as many bits, with scales in bfloat16 beside the codes. (Q14)"""
    assert k is not None
    padding = -k % spec.group
    if rotation:
        w_nk = ops.rotate.default(aten.to.dtype(w_nk, torch.float32), None, rotation)
    padded = aten.constant_pad_nd.default(w_nk, [0, padding])
    triple = quantize_to_half(torch.reshape(padded, (-1, spec.group)), spec.bits, spec.symmetric)
    if codes is None:
        codes = aten.slice.Tensor(_as_rows(triple[0], k + padding, w_nk), 1, 0, k)
    scale, zero = (_as_rows(t, (k + padding) // spec.group, w_nk) for t in triple[1:])
    shift = None if spec.symmetric else zero
    blocks = ops.pack_lowbit.default(codes, scale, shift, None, spec.bits, spec.group)
    return Stored({"blocks": blocks}, triple)


def _as_rows(values: Any, columns: int, w_nk: Any) -> Any:
    """[N, columns]; of none, as of a weight without elements, its shape."""
    if columns:
        return torch.reshape(values, (-1, columns))
    return aten.to.other(w_nk, values)


def quantize_to_half(rows: Any, bits: int, symmetric: bool) -> tuple[Any, Any, Any]:
    """`quantize` of rows, under its scales rounded to bfloat16. (Q14)"""
    found = ops.quantize.default(rows, [1], bits, symmetric)
    half = aten.to.dtype(aten.to.dtype(found[1], torch.bfloat16), torch.float32)
    scale, zero = torch.reshape(half, (-1,)), torch.reshape(found[2], (-1,))
    given = (scale, None if symmetric else zero)
    return ops.quantize_static.default(rows, *given, bits, symmetric)[0], half, found[2]


def _beside(blocks: Any, values: Values) -> dict[str, Any]:
    """The parts of a weight whose scales lie apart, those of groups column by column."""
    scales = {"scale": values.scale, "zero_point": values.zero_point}
    found = {name: t.t().contiguous().t() for name, t in scales.items() if t is not None}
    return {"blocks": blocks, **found}


def _int8_values(parts: Mapping[str, Any], spec: QSpec, n: int, k: int) -> Values:
    codes = ops.unpack_weight(parts["blocks"], n, k)
    return Values(codes, parts["scale"], parts.get("zero_point"))


def _packed_values(parts: Mapping[str, Any], spec: QSpec, n: int, k: int) -> Values:
    codes, scale, zero, minimum = ops.unpack_lowbit(parts["blocks"], n, k, spec.group)
    return Values(codes, scale) if spec.symmetric else Values(codes, scale, zero, minimum)


def _pack_lowbit(values: Values, spec: QSpec, group: int) -> dict[str, Any]:
    zero, minimum = values.zero_point, values.minimum
    if minimum is not None:
        some = zero is None or (has_values(minimum) and bool((minimum != 0).any()))
        zero, minimum = (None, minimum.float()) if some else (zero, None)
    zero = None if zero is None else zero.int()
    scale = values.scale.float()
    return {"blocks": ops.pack_lowbit(values.codes, scale, zero, minimum, spec.bits, spec.group)}


def _of_groups(spec: QSpec, n: int, k: int) -> tuple[int, ...]:
    return n, -(-k // (spec.group or max(k, 1)))


_NUMBER = 4  # bytes of a scale, and of a zero point
ROWS = Storage(
    name="rows",
    holds=lambda spec, group: not (spec.grouped or group),
    quantized=_rows,
    pack=lambda values, spec, group: _beside(ops.pack_weight(values.codes), values),
    unpack=_int8_values,
    scales=lambda spec, n, k: (n,),
    parts=lambda spec: ("blocks", "scale"),
    bytes=lambda spec, group, n, k: packed_size(n, k) + _NUMBER * n,
)
PACKED = Storage(
    name="packed",
    holds=lambda spec, group: spec.packed,
    quantized=_packed,
    pack=_pack_lowbit,
    unpack=_packed_values,
    scales=lambda spec, n, k: (n, -(-k // spec.group)),
    parts=lambda spec: ("blocks",),
    bytes=lambda spec, group, n, k: lowbit_size(
        n, k, spec.bits, spec.group, NONE if spec.symmetric else ZERO_POINTS
    ),
    cuts_k=True,
)
GROUPS = Storage(
    name="groups",
    holds=lambda spec, group: spec.grouped or group != 0,
    quantized=_groups,
    pack=lambda values, spec, group: _beside(ops.pack_weight(values.codes, group), values),
    unpack=_int8_values,
    scales=_of_groups,
    parts=lambda spec: ("blocks", "scale", *(() if spec.symmetric else ("zero_point",))),
    bytes=lambda spec, group, n, k: (
        packed_size(n, k, group) + _NUMBER * (2 - spec.symmetric) * prod(_of_groups(spec, n, k))
    ),
    cuts_k=True,
)
STORAGES = (ROWS, PACKED, GROUPS)


def storage_of(spec: QSpec, group: int) -> Storage:
    """The first row that holds weights of this kind, K cut into groups."""
    return next(storage for storage in STORAGES if storage.holds(spec, group))


def stored_bytes(spec: QSpec, group: int, n: int, k: int) -> int:
    """Of a weight [n, k] on the CPU."""
    return storage_of(spec, group).bytes(spec, group, n, k)
