"""Operators that use the codes of a quantized weight, not its floats: int8 matmuls, copies,
communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qfx.host.operators import TO_COPY
from qfx.host.subclasses import PIN_MEMORY
from qfx.host.tensors import tree_leaves, tree_map
from qfx.nn.float_proxy import FloatProxy, rule
from qfx.nn.frozen import Frozen, each, linear, moved
from qfx.nn.quantized_weight import QuantizedWeight
from qfx.nn.weight_view import WeightView
from qfx.ops.storage import Values, packed_values
from qfx.values.limits import FLOATS

aten = torch.ops.aten


def _int8(x: Any, weight: Any, bias: Any = None, transposed: bool = False) -> Any:
    """Returns x @ weight.T + bias, or x @ weight + bias if the weight is `transposed`, in int8."""
    if transposed:
        whole = isinstance(weight, WeightView) and isinstance(weight.base, QuantizedWeight)
        region = weight.region() if whole else None
        if region is None or not region.transposed or weight.shape[::-1] != weight.base.shape:
            return NotImplemented
        weight = weight.base
    if not isinstance(weight, QuantizedWeight) or x.dtype not in FLOATS:
        return NotImplemented
    if isinstance(x, FloatProxy) or isinstance(bias, FloatProxy):
        return NotImplemented
    with torch.no_grad():  # gradients are recorded in a layer above this one
        return linear(x, bias, weight.frozen, weight.how)


@rule(aten.linear.default)
def _(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return _int8(*args, **kwargs)


@rule(aten.addmm.default)
def _(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    bias, x, weight = args
    plain = not kwargs and bias.dim() == 1
    return _int8(x, weight, bias, transposed=True) if plain else NotImplemented


@rule(aten.mm.default)
def _(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    x, weight = args
    return _int8(x, weight, transposed=True)


@rule(aten.bmm.default)
def _(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Computes the bmm to which PyTorch reduces a linear if its 3-dimensional input is not
    contiguous, such as some of the tokens of each sequence."""
    x, weight = args
    matrix = weight.without_batches() if isinstance(weight, WeightView) else weight
    return NotImplemented if matrix is weight else _int8(x, matrix, transposed=True)


@rule(aten.clone.default, TO_COPY, aten.empty_like.default, PIN_MEMORY)
def _(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    (weight,), dtype = args[:1], kwargs.get("dtype")
    if dtype is not None and not (dtype.is_floating_point and func is not aten.empty_like.default):
        return NotImplemented
    if isinstance(weight, WeightView):
        region = weight.region() if isinstance(weight.base, QuantizedWeight) else None
        if region is None or region.transposed or func is TO_COPY:
            return NotImplemented
        made = weight.base.cut(region.rows, region.columns)  # type: ignore[attr-defined]
        return NotImplemented if made is None else made
    if not isinstance(weight, QuantizedWeight):
        return NotImplemented
    device = torch.device(kwargs.get("device") or weight.device)
    if device.type != weight.device.type:
        n, k = weight.shape
        return weight.like(moved(weight.frozen, weight.scheme, n, k, device), dtype)
    copies: dict[Any, Any] = {
        aten.empty_like.default: torch.empty_like,
        PIN_MEMORY: Tensor.pin_memory,
    }
    copy = copies.get(func, lambda t: t.to(device, copy=True))
    return weight.like(each(copy, weight.frozen), dtype)


@rule(aten.copy_.default)
def _(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Copies a weight, or rows and columns of one, into another weight as codes."""
    to, of = args[:2]
    if isinstance(to, QuantizedWeight) and isinstance(of, WeightView):
        of = of.clone()
    if not (isinstance(to, QuantizedWeight) and isinstance(of, QuantizedWeight)):
        return NotImplemented
    same = to.scheme == of.scheme and to.shape == of.shape
    if not same or not to.store(of.to(to.device).frozen):
        return NotImplemented  # through floats
    to.memory.has_scales_of_whole = of.memory.has_scales_of_whole
    to.settle()
    return to


@rule(aten.new_zeros.default)
def _(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Creates the memory for some rows of a weight, which FSDP requests, as a quantized weight."""
    weight, size = args
    if isinstance(weight, WeightView) and weight.region() is not None:
        weight = weight.base
    rows_of = isinstance(weight, QuantizedWeight) and len(size) == 2 and size[1] == weight.shape[1]
    if not rows_of or size[0] > weight.shape[0] or set(kwargs.values()) - {None, False}:
        return NotImplemented
    scheme, (codes, scale, zero, minimum) = weight.scheme, weight.unpacked
    if minimum is not None and bool((minimum != 0).any()):
        raise ValueError(f"{weight!r} has minimums, and zeros have none: FSDP cannot shard it")
    n = size[0]
    values = Values(
        torch.zeros_like(codes[:n]),
        torch.ones_like(scale[:n]),
        None if zero is None else torch.zeros_like(zero[:n]),
    )
    packed = packed_values(values, scheme.w, scheme.group)
    return weight.holding(weight.frozen._replace(packed=packed), scheme, size, weight.dtype)


def _collective(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Runs `func`, a collective operation of torch.distributed, on quantized weights: once for each
    tensor that a weight consists of (codes, scales and others), one after the other.

    Returns the first argument and the handle of the last operation, or NotImplemented if a tensor
    in the arguments is not a quantized weight."""
    whole = tree_map(lambda t: t.clone() if isinstance(t, WeightView) else t, args)
    sent = [t for t in tree_leaves(whole) if isinstance(t, Tensor)]
    if not all(isinstance(t, QuantizedWeight) for t in sent):
        return NotImplemented  # views that are not separate weights are sent as floats
    work: Any = None
    for name in Frozen._fields:
        if getattr(sent[0], name) is not None:
            *_, work = func(*tree_map(partial(_inner, name), whole), **kwargs)
            if hasattr(work, "wait"):
                work.wait()
    return args[0], work


def _inner(name: str, value: Any) -> Any:
    return getattr(value, name) if isinstance(value, QuantizedWeight) else value


if torch.distributed.is_available():
    rule(torch.ops.c10d.scatter_.default, torch.ops.c10d.broadcast_.default)(_collective)
