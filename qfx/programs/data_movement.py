"""Instructions for data movement: operators that copy elements and compute nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import fx

from qfx.host.operators import TO_COPY
from qfx.programs.bytecode import MOST_AXES, Operand
from qfx.programs.emit import EMIT, Emitter, Outside, argument

aten = torch.ops.aten
_WIDENED = (torch.int64, torch.bool, torch.uint8, torch.bfloat16, torch.float16)
_CHANGED = {(torch.float32, given) for given in _WIDENED} | {(torch.bool, torch.int64)}
CONVERSIONS = (aten.to.dtype, aten.to.device, aten.to.dtype_layout, TO_COPY)


def _copy(e: Emitter, node: fx.Node) -> None:
    source, out = e.of(node.args[0], None), e.of(node, None)
    if out.dtype != source.dtype and (out.dtype, source.dtype) not in _CHANGED:
        raise Outside
    if out.sizes != source.sizes:
        out = out.viewed(source.sizes)
    e("copy", out, source)


def _cat(e: Emitter, node: fx.Node) -> None:
    out = e.of(node)
    axis = argument(node, 1, "dim", 0) % len(out.sizes)
    begin = 0
    for each in node.args[0]:  # type: ignore[union-attr]
        part = e.of(each)
        if len(part.sizes) != len(out.sizes):
            raise Outside
        if 0 in part.sizes:
            continue
        place = out.offset + begin * out.strides[axis] * 4
        e("copy", Operand(out.region, place, out.dtype, part.sizes, out.strides), part)
        begin += part.sizes[axis]


def _stack(e: Emitter, node: fx.Node) -> None:
    out = e.of(node)
    axis = argument(node, 1, "dim", 0) % len(out.sizes)
    step = out.strides[axis] * 4
    for i, each in enumerate(node.args[0]):  # type: ignore[arg-type]
        place = replace(_without(out, axis), offset=out.offset + i * step)
        e("copy", place, e.of(each))


def _without(source: Operand, axis: int) -> Operand:
    sizes, strides = list(source.sizes), list(source.strides)
    del sizes[axis], strides[axis]
    return replace(source, sizes=tuple(sizes), strides=tuple(strides))


def _interleave(e: Emitter, node: fx.Node) -> None:
    """Emits a repetition of each element along an axis."""
    x, times, axis = e.of(node.args[0]), node.args[1], argument(node, 2, "dim")
    if axis is None or len(x.sizes) == MOST_AXES or not isinstance(times, int):
        raise Outside
    place = axis % len(x.sizes) + 1
    sizes, strides = list(x.sizes), list(x.strides)
    sizes.insert(place, times)
    strides.insert(place, 0)
    out = e.of(node)
    to = out if out.contiguous else e.fresh(out.sizes)
    e("copy", to.viewed(sizes), replace(x, sizes=tuple(sizes), strides=tuple(strides)))
    if to is not out:
        e("copy", out, to)


def _embedding(e: Emitter, node: fx.Node) -> None:
    out = e.of(node, None)
    table, indices = e.whole(node.args[0], out.dtype), e.whole(node.args[1], torch.int64)
    e("embedding", out, indices.viewed((math.prod(indices.sizes),)), table)


def _index(e: Emitter, node: fx.Node) -> None:
    """Emits x[:, places] for x [B, T, K]."""
    x, where, out = e.whole(node.args[0]), node.args[1], e.of(node)
    if not isinstance(where, list | tuple) or len(where) != 2 or where[0] is not None:
        raise Outside
    places = e.whole(where[1], torch.int64)
    if len(x.sizes) != 3 or len(places.sizes) != 1:
        raise Outside
    whole = out if out.contiguous else e.fresh(out.sizes)
    for b in range(x.sizes[0]):
        to, table = (
            replace(_without(t, 0), offset=t.offset + b * t.strides[0] * 4) for t in (whole, x)
        )
        e("embedding", to, places, table)
    if whole is not out:
        e("copy", out, whole)


EMIT |= {
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.repeat_interleave.self_int: _interleave,
    aten.embedding.default: _embedding,
    aten.index.Tensor: _index,
}
EMIT |= {
    copy: _copy
    for copy in (
        *CONVERSIONS, aten.clone.default, aten.contiguous.default, aten.reshape.default,
        aten.flatten.using_ints,
    )
}  # fmt: skip
