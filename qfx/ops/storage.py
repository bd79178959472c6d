"""Storage: how the codes of a weight and their scales lie in memory. One row for each way.

The functions run on tensors, and on `fx.Proxy` to emit the same operators into a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from qfx.values.scheme import PER_COLUMN, PER_TENSOR, QSpec

ops = torch.ops.qfx
aten = torch.ops.aten


class Stored(NamedTuple):
    """A quantized weight: its `blocks`, `scale` and perhaps `zero_point`, and codes, scale and zero
    point as `quantize` returns them."""

    parts: dict[str, Any]
    triple: Any


@dataclass(frozen=True)
class Storage:
    """`holds(spec, group)`: of which weights; `group`: the elements of K that are added up by
    themselves, be it for scales of x, 0 for all. `quantized(w_nk, spec, group, rotation, k, codes)`
    makes them from float, with `codes` in the place of the nearest where they are not None;
    `pack(codes_nk, group)` from codes alone, which `unpack(blocks, n, k)` gives back.
    `scales(spec, n, k)`: the shape of the scale, and of the zero point where there is one."""

    name: str
    holds: Callable[[QSpec, int], bool]
    quantized: Callable[[Any, QSpec, int, int, int | None, Any], Stored]
    pack: Callable[[Any, int], Any]
    unpack: Callable[[Any, int, int], Any]
    scales: Callable[[QSpec, int, int], tuple[int, ...]]
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
    size = spec.group or k
    padding = -k % size
    if rotation:
        w_nk = ops.rotate.default(aten.to.dtype(w_nk, torch.float32), None, rotation)
    padded = aten.constant_pad_nd.default(w_nk, [0, padding])
    rows = torch.reshape(padded, (-1, size))
    triple = ops.quantize.default(rows, [1], spec.bits, spec.symmetric)
    if codes is None:
        codes = aten.slice.Tensor(torch.reshape(triple[0], (-1, k + padding)), 1, 0, k)
    else:
        whole = aten.constant_pad_nd.default(codes, [0, padding])
        triple = (torch.reshape(whole, (-1, size)), triple[1], triple[2])
    names = ("scale",) if spec.symmetric else ("scale", "zero_point")
    parts = {"blocks": ops.pack_weight.default(codes, group)}
    for i, name in enumerate(names, 1):
        rows_g = torch.reshape(triple[i], (-1, (k + padding) // size))
        parts[name] = torch.t(aten.contiguous.default(torch.t(rows_g)))
    return Stored(parts, triple)


ROWS = Storage(
    name="rows",
    holds=lambda spec, group: not (spec.grouped or group),
    quantized=_rows,
    pack=lambda codes, group: ops.pack_weight(codes),
    unpack=lambda blocks, n, k: ops.unpack_weight(blocks, n, k),
    scales=lambda spec, n, k: (n,),
)
GROUPS = Storage(
    name="groups",
    holds=lambda spec, group: spec.grouped or group != 0,
    quantized=_groups,
    pack=lambda codes, group: ops.pack_weight(codes, group),
    unpack=lambda blocks, n, k: ops.unpack_weight(blocks, n, k),
    scales=lambda spec, n, k: (n, -(-k // (spec.group or max(k, 1)))),
    cuts_k=True,
)
STORAGES = (ROWS, GROUPS)


def storage_of(spec: QSpec, group: int) -> Storage:
    """The first row that holds weights of this kind, K cut into groups."""
    return next(storage for storage in STORAGES if storage.holds(spec, group))
