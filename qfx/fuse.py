"""Fuse: the canonical graph -> the fewest and fastest operators, with the same bits.

quantize(rotate(float32(x)))      ->  quantize(x) with the transform; quantize_static alike
dequantize(int8_mm(quantize(x)))  ->  int8_linear_dynamic(x)      x read by one site
                                  ->  int8_linear(quantize(x))    x static, or shared by several,
dequantize(int8_mm(quantize(x)))...  ->  int8_linears_dynamic(x)    one row, read by several sites
quantize_static(int8_linear(q))   ->  int8_linear_requantize(q)   nobody else reads the floats
dequantize(int8_bmm(quantize(a), quantize(b)))  ->  int8_bmm_dynamic(a, b)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from qfx.canonical import erase, finish
from qfx.capture import value
from qfx.coded import emit, inherit
from qfx.fault import at

ops = torch.ops.qfx
_QUANTIZES = (ops.quantize.default, ops.quantize_static.default)
_CODES = (*_QUANTIZES, ops.int8_linear_requantize.default)


def fuse(gm: fx.GraphModule) -> fx.GraphModule:
    """Edits the canonical graph of `qfx.canonical.rewrite` to its fused form and returns it."""
    graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
    for graph in graphs:
        for targets, rule in _RULES:
            for node in list(graph.nodes):
                if not node._erased and _calls(node, *targets):
                    with at(node):
                        rule(graph, node)
    finish(gm, graphs)
    return gm


def _fuse_transform(graph: fx.Graph, quantize: fx.Node) -> None:
    """quantize(rotate(float32(x), factor, rotation))  ->  quantize(x, factor, rotation)"""
    rotate: Any = quantize.args[0]
    if not _calls(rotate, ops.rotate.default):
        return
    cast, factor, rotation = rotate.args
    source = cast.args[0] if _calls(cast, torch.ops.aten.to) else cast
    quantize.args = (source, *quantize.args[1:], factor, rotation)
    erase(graph, rotate, down_to={source})


def _fuse_row(graph: fx.Graph, quantize: fx.Node) -> None:
    """dequantize(int8_mm(quantize(x)))...  ->  int8_linears_dynamic(x)...

    Readers that differ in activation or dtype, or whose weights come later, stay calls of their own,
    which quantize the row anew in less time than a call takes.
    """
    readers = [n for n in graph.nodes if _calls(n, ops.dequantize.default)]
    readers = [n for n in readers if _codes_of(n) is quantize and _one_row(n)]
    position = {n: i for i, n in enumerate(graph.nodes)}
    groups: dict[Any, list[fx.Node]] = {}
    for node in readers:
        groups.setdefault(node.args[5:], []).append(node)
    for end, group in groups.items():
        first: Any = group[0].args[0]
        ready = [n for n in group if all(position[w] < position[first] for w in _weight(n) if w)]
        if len(ready) > 1:
            _one_call(graph, quantize, ready, end, first)


def _one_call(
    graph: fx.Graph, quantize: fx.Node, readers: list[fx.Node], end: tuple[Any, ...], at: fx.Node
) -> None:
    x, axes, bits, symmetric, *transform = quantize.args
    weights = (list(operands) for operands in zip(*map(_weight, readers), strict=True))
    arguments = (x, *weights, axes, bits, symmetric, *end, *transform)
    with graph.inserting_before(at):
        name = f"{x}_int8"
        call = emit(graph, ops.int8_linears_dynamic.default, arguments, name)
        inherit(call, readers[0])
        results = [
            emit(graph, operator.getitem, (call, i), f"{n.name.removesuffix('_dequantize')}_int8")
            for i, n in enumerate(readers)
        ]
    for node, y in zip(readers, results, strict=True):
        y.meta = dict(node.meta)
        node.replace_all_uses_with(y)
        erase(graph, node, down_to={x})


def _weight(dequantize: fx.Node) -> tuple[Any, Any, Any]:
    """packed, w_scale, bias"""
    acc: Any = dequantize.args[0]
    return acc.args[2], dequantize.args[3], dequantize.args[4]


def _parts_of(dequantize: fx.Node) -> tuple[Any, ...]:
    """q, scale, zero_point of the activations"""
    acc: Any = dequantize.args[0]
    return acc.args[0], dequantize.args[1], acc.args[1]


def _codes_of(dequantize: fx.Node) -> fx.Node | None:
    """The triple of codes that a linear multiplies, where nobody else reads its integer sums."""
    acc: Any = dequantize.args[0]
    if not _calls(acc, ops.int8_mm.default) or dequantize.args[2] is not None:
        return None
    parts = _parts_of(dequantize)
    triple: Any = parts[0].args[0] if _calls(parts[0], operator.getitem) else None
    whole = all(_calls(p, operator.getitem) and p.args == (triple, i) for i, p in enumerate(parts))
    return triple if _calls(triple, *_CODES) and whole and len(acc.users) == 1 else None


def _fuse_linear(graph: fx.Graph, dequantize: fx.Node) -> None:
    arguments: Any = dequantize.args
    acc, _, _, w_scale, bias, activation, out_dtype = arguments
    if _calls(acc, ops.int8_bmm.default):
        _fuse_product(graph, dequantize)
        return
    triple = _codes_of(dequantize)
    if triple is None:
        return
    parts, packed, replaced = _parts_of(dequantize), acc.args[2], dequantize
    q, operands = parts[0], (*parts, packed, w_scale, bias, activation)
    then = _static_reader(dequantize) if out_dtype == torch.float32 else None
    if then is not None:
        replaced = then
        call = (ops.int8_linear_requantize.default, (*operands, *then.args[1:]))
    elif _calls(triple, ops.quantize.default) and (len(q.users) == 1 or _one_row(dequantize)):
        x, axes, bits, symmetric, *transform = triple.args
        how = (axes, bits, symmetric, activation, out_dtype, *transform)
        call = (ops.int8_linear_dynamic.default, (x, packed, w_scale, bias, *how))
    else:
        call = (ops.int8_linear.default, (*operands, out_dtype))
    with graph.inserting_before(acc):
        fused = emit(graph, *call, f"{dequantize.name.removesuffix('_dequantize')}_int8")
    fused.meta = dict(replaced.meta)
    replaced.replace_all_uses_with(fused)
    erase(graph, replaced, down_to={triple.args[0]})


def _static_reader(dequantize: fx.Node) -> fx.Node | None:
    """The static quantization, without a transform, that alone reads the result."""
    node = dequantize
    while len(node.users) == 1:
        (user,) = node.users
        if _calls(user, ops.quantize_static.default) and user.args[0] is node:
            return user if len(user.args) == 5 else None
        if not _calls(user, torch.detach):
            return None
        node = user
    return None


def _fuse_product(graph: fx.Graph, dequantize: fx.Node) -> None:
    """dequantize(int8_bmm(quantize(a), quantize(b)))  ->  int8_bmm_dynamic(a, b)"""
    acc: Any = dequantize.args[0]
    q, _, b_q = acc.args
    left, right = q.args[0], b_q.args[0]
    if any(len(n.users) != 1 for n in (acc, q, b_q)):
        return
    (a, *spec), (b, _, b_bits, _) = left.args, right.args
    arguments = (a, b, *spec, b_bits, dequantize.args[-1])
    with graph.inserting_before(acc):
        name = f"{dequantize.name.removesuffix('_dequantize')}_int8"
        fused = emit(graph, ops.int8_bmm_dynamic.default, arguments, name)
    fused.meta = dict(dequantize.meta)
    dequantize.replace_all_uses_with(fused)
    erase(graph, dequantize, down_to={a, b})


def _one_row(y: fx.Node) -> bool:
    known = value(y)
    return isinstance(known, Tensor) and all(type(s) is int and s == 1 for s in known.shape[:-1])


def _calls(node: Any, *targets: object) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


_RULES: tuple[tuple[tuple[Any, ...], Any], ...] = (
    (_QUANTIZES, _fuse_transform),
    ((ops.quantize.default,), _fuse_row),
    ((ops.dequantize.default,), _fuse_linear),
)
