"""Instructions for an int8 cache of keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from qfx.programs.bytecode import Operand
from qfx.programs.emit import EMIT, Emitter, Outside
from qfx.programs.linears import arguments

ops = torch.ops.qfx


def _cache(e: Emitter, operands: dict[str, Any]) -> list[Operand]:
    """Returns the operands of keys with their scales, then of values, in the order of
    csrc/cpu/program/caches.cpp."""
    names = ("keys", "key_scale", "values", "value_scale")
    found = [e.of(operands[name], None) for name in names]
    if not all(operand.contiguous for operand in found):
        raise Outside
    return found


def _rows(e: Emitter, node: Any) -> Operand:
    """Returns the operand of a node, copied if its last axis is not contiguous."""
    found = e.of(node)
    return found if found.strides[-1] == 1 else e.copied(found)


def _write(e: Emitter, node: fx.Node) -> None:
    operands = arguments(node)
    places = e.whole(operands["places"], torch.int64)
    e("kv_write", *_cache(e, operands), _rows(e, operands["k"]), _rows(e, operands["v"]), places)


def _attention(e: Emitter, node: fx.Node) -> None:
    operands = arguments(node)
    out, length = e.of(node), operands["length"]
    query, mask = _rows(e, operands["q"]), operands["mask"]
    parts: list[Any] = [*_cache(e, operands), query, out, mask is not None]
    if mask is not None:
        seen = e.of(mask, None)
        if seen.dtype not in (torch.bool, torch.float32):
            raise Outside
        parts.append(seen.expanded((*out.sizes[:3], length)))
    table = operands.get("block_table")
    found = [] if table is None else [e.whole(table, torch.int32)]
    e(
        "kv_attention",
        *parts,
        float(operands["scale"]),
        length,
        table is not None,
        *found,
        float(operands["softcap"]),
    )


EMIT |= {ops.kv_write.default: _write, ops.kv_attention.default: _attention}
