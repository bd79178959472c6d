"""Instructions for routing, the choice of experts for each token: linears in float with few
outputs, softmax, and the greatest elements of rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from qfx.programs.bytecode import Operand
from qfx.programs.data_movement import CONVERSIONS
from qfx.programs.emit import EMIT, Emitter, Outside, argument, unchanged
from qfx.programs.linears import arguments

aten = torch.ops.aten
# Outputs of a linear in float: routers have fewer. For one token PyTorch's matmul takes about as
# long, for a prompt half of the time.
MOST_OUTPUTS = 512
_HALVES = (torch.bfloat16, torch.float16)


def _linear(e: Emitter, node: fx.Node) -> None:
    """Emits a linear in float32, also where 16-bit weights multiply floats that were rounded for
    it: then without that rounding."""
    operands = arguments(node)
    source, end = operands["input"], node
    weight = e.whole(operands["weight"], None)
    if weight.dtype in _HALVES:
        source, end = _float_source(source, e, node), _float_end(node, e)
    out = e.of_value(e.values[end])
    if len(weight.sizes) != 2 or weight.sizes[0] > MOST_OUTPUTS or 0 in weight.sizes:
        raise Outside
    if not out.contiguous:
        raise Outside
    bias = operands["bias"]
    added = [0] if bias is None else [1, e.whole(bias, None)]
    e("float_linear", out, e.whole(source), weight, *added)
    if end is not node:
        e.ends[node] = end


def _float_source(node: fx.Node, e: Emitter, reader: fx.Node) -> fx.Node:
    """Returns the node in float32 that `node` is a conversion of, if `reader` may read it."""
    source = node.args[0] if node.target in CONVERSIONS else None
    if not isinstance(source, fx.Node) or e.values[source].dtype != torch.float32:
        raise Outside
    if not unchanged(e, source, node, reader):
        raise Outside
    return source


def _float_end(node: fx.Node, e: Emitter) -> fx.Node:
    """Returns the conversion to float32 that is the only reader of `node`."""
    ends = list(node.users)
    if len(ends) != 1 or ends[0].target not in CONVERSIONS:
        raise Outside
    if e.values[ends[0]].dtype != torch.float32:
        raise Outside
    return ends[0]


def _is_last(axis: object, x: Operand) -> bool:
    return bool(x.sizes) and axis in (-1, len(x.sizes) - 1)


def _softmax(e: Emitter, node: fx.Node) -> None:
    x, out = e.whole(node.args[0]), e.of(node)
    if not _is_last(node.args[1], x) or not out.contiguous:
        raise Outside
    e("softmax", out, x)


def _sum(e: Emitter, node: fx.Node) -> None:
    x, out = e.whole(node.args[0]), e.of(node)
    axes = argument(node, 1, "dim")
    if not isinstance(axes, list | tuple) or len(axes) != 1 or not _is_last(axes[0], x):
        raise Outside
    if x.sizes[-1] == 0 or not out.contiguous:
        raise Outside
    e("sum", out.viewed((*x.sizes[:-1], 1)), x)


def _top_k(e: Emitter, node: fx.Node) -> None:
    x = e.whole(node.args[0])
    values, indices = e.values[node]
    axis, largest = argument(node, 2, "dim", -1), argument(node, 3, "largest", True)
    if not largest or not _is_last(axis, x):
        raise Outside
    if values.numel() == 0:
        return
    of_values, places = e.of_value(values), e.of_value(indices, torch.int64)
    if not (of_values.contiguous and places.contiguous):
        raise Outside
    e("top_k", of_values, places, x)


def _gather(e: Emitter, node: fx.Node) -> None:
    out = e.of(node, None)
    x, indices = e.whole(node.args[0], out.dtype), e.whole(node.args[2], torch.int64)
    if out.dtype not in (torch.float32, torch.int64):
        raise Outside
    if not _is_last(node.args[1], x) or x.sizes[:-1] != indices.sizes[:-1] or not out.contiguous:
        raise Outside
    e("gather", out, x, indices)


def _scatter_in_place(e: Emitter, node: fx.Node) -> None:
    _scatter_to(e, node, e.of(node))


def _scatter(e: Emitter, node: fx.Node) -> None:
    out = e.of(node)
    e("copy", out, e.of(node.args[0]))
    _scatter_to(e, node, out)


def _scatter_to(e: Emitter, node: fx.Node, out: Operand) -> None:
    axis, indices = node.args[1], e.whole(node.args[2], torch.int64)
    fits = _is_last(axis, out) and out.sizes[:-1] == indices.sizes[:-1]
    if not fits or not out.contiguous:
        raise Outside
    if 0 not in indices.sizes:
        e("scatter", out, indices, float(node.args[3]))  # type: ignore[arg-type]


def _filled_like(value: float, e: Emitter, node: fx.Node) -> None:
    out = e.of(node)
    e("copy", out, e.of(value).expanded(out.sizes))


def _masked_fill(e: Emitter, node: fx.Node) -> None:
    """Emits where(mask, value, x). The mask may be made of floats, which are true where they are
    not 0, and negated."""
    out, x = e.of(node), e.of(node.args[0])
    mask: Any = node.args[1]
    filled, kept = e.of(node.args[2]).expanded(out.sizes), x.expanded(out.sizes)
    if mask.target in (aten.bitwise_not.default, aten.logical_not.default):
        if not unchanged(e, mask.args[0], mask, node):
            raise Outside
        mask, filled, kept = mask.args[0], kept, filled
    if mask.target in CONVERSIONS and e.values[mask.args[0]].dtype == torch.float32:
        mask = _float_source(mask, e, node)
    seen = e.values[mask]
    if not isinstance(seen, Tensor) or seen.dtype not in (torch.bool, torch.float32):
        raise Outside
    e("where", out, e.of(mask, None).expanded(out.sizes), filled, kept)


def _clamp(e: Emitter, node: fx.Node) -> None:
    x, out = e.of(node.args[0]), e.of(node)
    least, most = argument(node, 1, "min"), argument(node, 2, "max")
    if least is not None:
        x = e.binary("maximum", out, x, e.of(least))
    if most is not None:
        e.binary("minimum", out, x, e.of(most))


EMIT |= {
    aten.linear.default: _linear,
    aten.softmax.int: _softmax,
    aten.sum.dim_IntList: _sum,
    aten.topk.default: _top_k,
    aten.gather.default: _gather,
    aten.scatter.value: _scatter,
    aten.scatter_.value: _scatter_in_place,
    aten.masked_fill.Scalar: _masked_fill,
    aten.clamp.default: _clamp,
    aten.zeros_like.default: partial(_filled_like, 0.0),
}
