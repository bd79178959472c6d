"""Instructions for attention to all keys at once, as encoders have it, in float and in int8."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from qfx.host.operators import schema
from qfx.programs.bytecode import Operand
from qfx.programs.emit import EMIT, Emitter, Outside
from qfx.programs.linears import arguments

aten, ops = torch.ops.aten, torch.ops.qfx
_AXES = 4


def _with_axes(x: Operand) -> Operand:
    """Returns an operand of up to four axes with axes of size 1 in front, so that it has four."""
    more = (0,) * (_AXES - len(x.sizes))
    if len(x.sizes) > _AXES:
        raise Outside
    return replace(x, sizes=(*(1 for _ in more), *x.sizes), strides=(*more, *x.strides))


def _heads(e: Emitter, node: Any, batch: int) -> Operand:
    """Returns the operand [B, H, T, D] of queries, keys or values, with contiguous rows."""
    x = e.of(node)
    x = x if x.strides[-1] == 1 or x.sizes[-1] == 1 else e.copied(x)
    x = _with_axes(x)
    return x.expanded((batch, *x.sizes[1:]))


def _attend(
    e: Emitter,
    node: fx.Node,
    operands: tuple[Any, Any, Any],
    mask: Any,
    scale: float | None,
    causal: bool,
    in_int8: bool,
) -> None:
    out = _with_axes(e.of(node))
    batch, heads, m = out.sizes[:3]
    q, k, v = (_heads(e, operand, batch) for operand in operands)
    if q.sizes[1] != heads or v.sizes[1] != k.sizes[1] or heads % k.sizes[1]:
        raise Outside
    parts: list[Any] = [float(q.sizes[-1] ** -0.5 if scale is None else scale), int(causal)]
    if mask is None:
        parts.append(0)
    else:
        seen = e.of(mask, None)
        if seen.dtype not in (torch.bool, torch.float32):
            raise Outside
        parts += [1, _with_axes(seen).expanded((batch, heads, m, k.sizes[2]))]
    direct = out.contiguous or (not in_int8 and out.strides[-1] == 1)
    to = out if direct else e.fresh(out.sizes)
    e("attention", to, q, k, v, int(in_int8), *parts)
    if to is not out:
        e("copy", out, to)


def _int8(e: Emitter, node: fx.Node) -> None:
    given = arguments(node)
    if given["out_dtype"] != torch.float32:
        raise Outside
    operands = given["q"], given["k"], given["v"]
    _attend(e, node, operands, given["mask"], given["scale"], given["causal"], True)


def _float(e: Emitter, node: fx.Node) -> None:
    known = {a.name: a.default_value for a in schema(node.target).arguments}
    given = known | dict(zip(known, node.args, strict=False)) | dict(node.kwargs)
    if given["dropout_p"] != 0:
        raise Outside
    operands = given["query"], given["key"], given["value"]
    _attend(e, node, operands, given["attn_mask"], given["scale"], given["is_causal"], False)


EMIT |= {
    ops.int8_attention.default: _int8,
    aten.scaled_dot_product_attention.default: _float,
}
