"""Instructions for an int8 cache of keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from qfx.programs.bytecode import Operand
from qfx.programs.emit import EMIT, Emitter, Outside
from qfx.programs.linears import arguments

ops = torch.ops.qfx


def _cache(e: Emitter, given: dict[str, Any]) -> list[Operand]:
    """Returns the operands of keys with their scales, then of values, in the order of
    csrc/cpu/program/caches.cpp."""
    names = ("keys", "key_scale", "values", "value_scale")
    found = [e.of(given[name], None) for name in names]
    if not all(operand.contiguous for operand in found):
        raise Outside
    return found


def _rows(e: Emitter, node: Any) -> Operand:
    """Returns an operand whose last axis is contiguous, copied if necessary."""
    found = e.of(node)
    return found if found.strides[-1] == 1 else e.copied(found)


def _write(e: Emitter, node: fx.Node) -> None:
    given = arguments(node)
    places = e.whole(given["places"], torch.int64)
    e("kv_write", *_cache(e, given), _rows(e, given["k"]), _rows(e, given["v"]), places)


def _attention(e: Emitter, node: fx.Node) -> None:
    given = arguments(node)
    out, length = e.of(node), given["length"]
    query, mask = _rows(e, given["q"]), given["mask"]
    parts: list[Any] = [*_cache(e, given), query, out, mask is not None]
    if mask is not None:
        seen = e.of(mask, None)
        if seen.dtype not in (torch.bool, torch.float32):
            raise Outside
        parts.append(seen.expanded((*out.sizes[:3], length)))
    table = given.get("block_table")
    found = [] if table is None else [e.whole(table, torch.int32)]
    e(
        "kv_attention",
        *parts,
        float(given["scale"]),
        length,
        table is not None,
        *found,
        float(given["softcap"]),
    )


EMIT |= {ops.kv_write.default: _write, ops.kv_attention.default: _attention}
