"""Inlining: on a GPU, quantization becomes the aten operators of its reference.

Inductor's Triton kernels then compute the codes where the activations are computed, in the norm or
the activation function before the matmul. The bits are those of the operator, (Q1)-(Q4) and (Q6),
because every division is an `addcdiv`, whose quotient Inductor rounds as IEEE does. For `div`
Inductor multiplies by the rounded reciprocal of a constant, and divides approximately by anything
else. A rotation stays in its operator: docs/decisions/0013-quantization-on-cuda-is-aten.md.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from qfx.graph.capture import device, value
from qfx.ops.code import Code
from qfx.ops.quantize import SMALLEST_SCALE, code_range
from qfx.rewriting.canonical import erase
from qfx.rewriting.notation import INLINED

ops = torch.ops.qfx
aten = torch.ops.aten
Parts = tuple[Any, Any, Any]
_INT = torch.int32


def inlined(quantize: fx.Node) -> bool:
    """Whether this call of quantize becomes aten operators."""
    if quantize.target is not ops.quantize.default or device(quantize).type != "cuda":
        return False
    x, code, scale, _, seed, _ = (*quantize.args, *(None,) * 4)[:6]
    how = Code(*code)  # type: ignore[misc]
    if how.rotation or how.group or seed is not None:
        return False
    return _has_elements(x, scale is None and bool(how.per_tensor)) and _is_one(scale)


def inline(graph: fx.Graph, quantize: fx.Node) -> None:
    """Replaces (q, scale, zero_point) = quantize(x) by aten operators, one node for each part."""
    if not inlined(quantize):
        return
    tracer = fx.proxy.GraphAppendingTracer(graph)
    sources = set(quantize.all_input_nodes)
    with graph.inserting_before(quantize):
        arguments: Any = fx.node.map_arg(quantize.args, lambda node: fx.Proxy(node, tracer))  # type: ignore[arg-type, return-value]
        parts = quantize_parts(*arguments)
    for reader in list(quantize.users):
        assert reader.target is operator.getitem
        part = parts[reader.args[1]].node  # type: ignore[index]
        part.meta = {**reader.meta, INLINED: (quantize.name, reader.args[1])}
        reader.replace_all_uses_with(part)
        graph.erase_node(reader)
    graph.erase_node(quantize)
    for part in parts:
        erase(graph, part.node, down_to=sources)


def quantize_parts(
    x: Any,
    code: Sequence[int],
    scale: Any = None,
    zero_point: Any = None,
    seed: None = None,
    factor: Any = None,
) -> Parts:
    """Computes quantize by aten operators, on tensors or on `fx.Proxy`; for codes without groups
    and rotation, and without a seed."""
    how, rows = Code(*code), aten.to.dtype(x, torch.float32)
    rows = rows if factor is None else aten.mul.Tensor(rows, factor)  # (R1)
    limits = code_range(how.bits, bool(how.symmetric))
    if scale is not None:
        return _static_parts(x, rows, scale, zero_point, limits)
    return _dynamic_parts(x, rows, how, limits)


def _dynamic_parts(x: Any, rows: Any, how: Code, limits: tuple[int, int]) -> Parts:
    (qmin, qmax), symmetric = limits, how.symmetric
    shared, largest = how.per_tensor, None
    if symmetric:
        high, low = aten.amax.default(aten.abs.default(rows), [-1], True), None
        if shared:
            (high,), largest = _of_finite_rows(high)
        scale = _ratio(high, _number(x, qmax))  # (Q1)
    else:
        high = aten.clamp_min.default(aten.amax.default(rows, [-1], True), 0)
        low = aten.clamp_max.default(aten.amin.default(rows, [-1], True), 0)
        if shared:
            (high, low), largest = _of_finite_rows(high, low)
        steps = _number(x, qmax - qmin)
        scale = aten.sub.Tensor(_ratio(high, steps), _ratio(low, steps))  # (Q2)
    scale = aten.clamp_min.default(scale, SMALLEST_SCALE)
    inverse = _ratio(_number(x, 1), scale)
    finite = aten.isfinite.default(scale if largest is None else largest)
    q = aten.round.default(aten.mul.Tensor(rows, inverse))  # (Q3)
    used = scale if largest is None else aten.where.self(finite, scale, largest)
    if symmetric:
        return _codes(q, qmin, qmax, finite), used, _zeros(used)
    origin = aten.round.default(aten.mul.Tensor(low, inverse))
    zero = aten.clamp.default(aten.rsub.Scalar(origin, qmin), qmin, qmax)
    q = _codes(aten.add.Tensor(q, zero), qmin, qmax, finite)
    return q, used, aten.to.dtype(_where(finite, zero), _INT)


def _of_finite_rows(high: Any, low: Any = None) -> tuple[list[Any], Any]:
    """Returns the ends of the range of all rows without a NaN or an infinity, and the greatest
    magnitude in each row."""
    largest = high if low is None else aten.maximum.default(high, aten.neg.default(low))
    finite = aten.isfinite.default(largest)
    ends = [aten.amax.default(_where(finite, high), [], True)]
    if low is not None:
        ends.append(aten.amin.default(_where(finite, low), [], True))
    return ends, largest


def _static_parts(x: Any, rows: Any, scale: Any, zero_point: Any, limits: tuple[int, int]) -> Parts:
    """Quantizes with a static scale. Equation (Q6)."""
    qmin, qmax = limits
    used = aten.clamp_min.default(scale, SMALLEST_SCALE)
    q = aten.mul.Tensor(rows, _ratio(_number(x, 1), used))
    q = aten.round.default(aten.clamp.default(q, -1024, 1024))
    largest = aten.amax.default(aten.abs.default(rows), [-1], True)
    whole, given = aten.isfinite.default(largest), aten.isfinite.default(scale)
    finite = aten.logical_and.default(whole, given)
    used = aten.where.self(given, used, scale)
    used = aten.where.self(whole, used, largest)
    if zero_point is None:
        return _codes(q, qmin, qmax, finite), used, _zeros(largest)
    zero = aten.clamp.default(zero_point, qmin, qmax)
    q = _codes(aten.add.Tensor(q, zero), qmin, qmax, finite)
    return q, used, _where(finite, zero)


def _codes(q: Any, qmin: int, qmax: int, finite: Any) -> Any:
    """Clamps codes to their range, and sets codes of rows that are not finite to 0. Equation (Q4).
    `where` comes last because it is read twice: an operation that is read only once is copied by
    Inductor into each reader."""
    return _where(finite, aten.to.dtype(aten.clamp.default(q, qmin, qmax), torch.int8))


def _where(finite: Any, values: Any) -> Any:
    return aten.where.ScalarOther(finite, values, 0)


def _zeros(positive: Any) -> Any:
    """Returns int32 zeros from the kernel that computes `positive`; a constant would need a launch
    of its own."""
    return aten.to.dtype(aten.lt.Scalar(positive, 0), _INT)


def _number(like: Any, number: int) -> Any:
    return aten.new_full.default(like, [], float(number), dtype=torch.float32)


def _ratio(a: Any, b: Any) -> Any:
    """Returns a / b, rounded to nearest."""
    return aten.addcdiv.default(aten.zeros_like.default(b), a, b)


def _has_elements(x: Any, whole: bool) -> bool:
    """Whether no axis of x [..., K] over which a range is reduced can have size 0. `whole`: these
    are all axes, including symbolic ones; otherwise K alone."""
    while x.target is torch.detach:
        (x,) = x.args
    known = value(x)
    if not isinstance(known, Tensor) or not known.dim() or type(known.shape[-1]) is not int:
        return False
    sizes = known.shape if whole else [s for s in known.shape if type(s) is int]
    return all(statically_known_true(size > 0) for size in sizes)


def _is_one(scale: Any) -> bool:
    """Whether a static scale is a single number. The scale of a recipe is; the node of such a scale
    has no recorded value."""
    known = value(scale) if isinstance(scale, fx.Node) else None
    return not isinstance(known, Tensor) or statically_known_true(known.numel() == 1)
