"""The forms in which a compiled graph saves an activation: codes of rows, and bits of flags.

Each is emitted as operators: what is saved in the forward graph, and the tensor from it in the
backward graph, with the sizes, strides and dtype that it had.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from qfx.graph.capture import value
from qfx.host.shapes import hint
from qfx.host.tensors import fake_mode_of
from qfx.ops.code import Code
from qfx.values.limits import FEWEST_SAVED, FLOATS, NARROWEST_SAVED

aten, prims, ops = torch.ops.aten, torch.ops.prims, torch.ops.qfx
_BYTE = 8  # flags in a byte


class CallEmitter:
    """Emits calls before a node of a graph, each with its fake value."""

    def __init__(self, before: fx.Node, name: str) -> None:
        self.before, self.name = before, name

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        graph = self.before.graph
        with graph.inserting_before(self.before):
            node = graph.create_node("call_function", target, args, kwargs, name=self.name)
        given, named = fx.node.map_arg((args, kwargs), value)
        mode: Any = fake_mode_of([value(n) for n in graph.nodes if n.op == "placeholder"])
        with mode:
            node.meta["val"] = target(*given, **named)
        return node


class SavedForm(NamedTuple):
    """`pack`: (emitter in the forward graph, tensor) -> what is saved. `unpack`: (emitter in the
    backward graph, what was saved, fake tensor like the result) -> the result."""

    pack: Callable[[CallEmitter, fx.Node], list[fx.Node]]
    unpack: Callable[[CallEmitter, Sequence[fx.Node], Tensor], fx.Node]


def order_in_memory(tensor: Tensor) -> tuple[int, ...] | None:
    """Returns the axes of a tensor in the order in which its memory has them, so that permuting by
    it gives a contiguous tensor; None if there is no such order."""
    shape, strides = [hint(n) for n in tensor.shape], [hint(n) for n in tensor.stride()]
    if None in shape or None in strides:
        return None
    axes = sorted(range(tensor.ndim), key=lambda i: (-strides[i], i))  # type: ignore[operator]
    expected = [prod(shape[i] for i in axes[at + 1 :]) for at in range(tensor.ndim)]  # type: ignore[misc]
    dense = all(shape[i] == 1 or strides[i] == n for i, n in zip(axes, expected, strict=True))
    return tuple(axes) if dense else None


def form_of(tensor: Tensor) -> SavedForm | None:
    """Returns the form in which a tensor is saved; None if it stays as it is."""
    order = order_in_memory(tensor)
    if order is None or tensor.ndim < 2 or prod(map(hint, tensor.shape)) < FEWEST_SAVED:  # type: ignore[arg-type]
        return None
    if tensor.dtype == torch.bool:
        static = all(isinstance(n, int) for n in tensor.shape)
        return BITS if static and tensor.numel() % _BYTE == 0 else None
    narrow = hint(tensor.shape[order[-1]]) < NARROWEST_SAVED  # type: ignore[operator]
    return None if narrow or tensor.dtype not in FLOATS else CODES


def _codes(emit: CallEmitter, x: fx.Node) -> list[fx.Node]:
    tensor = value(x)
    seed = emit(aten.randint.low, 0, 2**62, [1], dtype=torch.int64, device=tensor.device)
    rows = _in_memory_order(emit, x, tensor)
    triple = emit(ops.quantize.default, rows, list(Code()), None, None, seed)
    return [emit(operator.getitem, triple, i) for i in (0, 1)]


def _from_codes(emit: CallEmitter, saved: Sequence[fx.Node], like: Tensor) -> fx.Node:
    q, scale = saved
    y = emit(aten.mul.Tensor, _to(emit, q, torch.float32), scale)
    return _as_it_was(emit, _to(emit, y, like.dtype), like)


def _bits(emit: CallEmitter, flags: fx.Node) -> list[fx.Node]:
    tensor = value(flags)
    eights = emit(aten.view.default, _in_memory_order(emit, flags, tensor), [-1, _BYTE])
    bits = emit(
        aten.bitwise_left_shift.Tensor, _to(emit, eights, torch.int32), _places(emit, tensor)
    )
    return [_to(emit, emit(aten.sum.dim_IntList, bits, [1]), torch.uint8)]


def _from_bits(emit: CallEmitter, saved: Sequence[fx.Node], like: Tensor) -> fx.Node:
    order = order_in_memory(like) or ()
    column = emit(aten.unsqueeze.default, _to(emit, saved[0], torch.int32), 1)
    bits = emit(aten.bitwise_right_shift.Tensor, column, _places(emit, like))
    flags = emit(aten.ne.Scalar, emit(aten.bitwise_and.Scalar, bits, 1), 0)
    shaped = emit(aten.view.default, flags, [like.shape[i] for i in order])
    return _as_it_was(emit, shaped, like)


def _places(emit: CallEmitter, like: Tensor) -> fx.Node:
    of = {"dtype": torch.int32, "device": like.device, "requires_grad": False}
    return emit(prims.iota.default, _BYTE, start=0, step=1, **of)


def _to(emit: CallEmitter, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    same = value(x).dtype == dtype
    return x if same else emit(prims.convert_element_type.default, x, dtype)


def _in_memory_order(emit: CallEmitter, x: fx.Node, tensor: Tensor) -> fx.Node:
    order = order_in_memory(tensor) or ()
    same = order == tuple(range(tensor.ndim))
    return x if same else emit(aten.permute.default, x, [*order])


def _as_it_was(emit: CallEmitter, y: fx.Node, like: Tensor) -> fx.Node:
    """Undoes `_in_memory_order`."""
    order = order_in_memory(like) or ()
    back = [order.index(i) for i in range(like.ndim)]
    return y if back == [*range(like.ndim)] else emit(aten.permute.default, y, back)


CODES, BITS = SavedForm(_codes, _from_codes), SavedForm(_bits, _from_bits)
