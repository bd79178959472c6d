"""Fuse: the canonical graph -> the fewest and fastest operators, with the same bits.

quantize(rotate(float32(x)))      ->  quantize(x) with the transform; quantize_static alike
dequantize(int8_mm(quantize(x)))  ->  int8_linear_dynamic(x)      x read by one site
                                  ->  int8_linear(quantize(x))    x static, or shared by several,
                                      unless it is one row: that is quantized anew in less time than
                                      a call takes
quantize_static(int8_linear(q))   ->  int8_linear_requantize(q)   nobody else reads the floats
dequantize(int8_bmm(quantize(a), quantize(b)))  ->  int8_bmm_dynamic(a, b)

On a GPU Inductor fuses what stands between operators: there what quantizes without a rotation
becomes the aten operators of `qfx.rewriting.aten_quantization`, and int8_linear reads its codes
(docs/decisions/0013-quantization-on-cuda-is-aten.md).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from qfx.graph.capture import device, graphs, value
from qfx.graph.faults import at
from qfx.host.nodes import is_erased
from qfx.rewriting.aten_quantization import inline, inlined
from qfx.rewriting.canonical import erase, finish
from qfx.rewriting.codes import emit

ops = torch.ops.qfx
_QUANTIZES = (ops.quantize.default, ops.quantize_static.default)
_CODES = (*_QUANTIZES, ops.int8_linear_requantize.default)


def fuse(gm: fx.GraphModule) -> fx.GraphModule:
    """Edits the canonical graph to its fused form and returns it."""
    for graph in graphs(gm):
        for targets, rule in _RULES:
            for node in list(graph.nodes):
                if not is_erased(node) and _calls(node, *targets):
                    with at(node):
                        rule(graph, node)
    finish(gm, graphs(gm))
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


def _fuse_linear(graph: fx.Graph, dequantize: fx.Node) -> None:
    arguments: Any = dequantize.args
    acc, scale, zero_point, w_scale, bias, activation, out_dtype = arguments
    if _calls(acc, ops.int8_bmm.default):
        _fuse_product(graph, dequantize)
        return
    if not _calls(acc, ops.int8_mm.default) or zero_point is not None or len(acc.users) != 1:
        return
    q, q_zero_point, packed, _ = acc.args
    triple: Any = q.args[0] if _calls(q, operator.getitem) else None
    parts = [q, scale, q_zero_point]
    if not _calls(triple, *_CODES) or not all(
        _calls(p, operator.getitem) and p.args == (triple, i) for i, p in enumerate(parts)
    ):
        return
    operands, replaced = (*parts, packed, w_scale, bias, activation), dequantize
    then = _static_reader(dequantize) if out_dtype == torch.float32 else None
    if then is not None:
        replaced = then
        call = (ops.int8_linear_requantize.default, (*operands, *then.args[1:]))
    elif not inlined(triple) and _quantizes_anew(triple, q, dequantize):
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


def _quantizes_anew(triple: fx.Node, q: fx.Node, dequantize: fx.Node) -> bool:
    """One reader, or one row, which a CPU quantizes in less time than a call takes."""
    if not _calls(triple, ops.quantize.default):
        return False
    return len(q.users) == 1 or (_one_row(dequantize) and device(triple).type == "cpu")


def _one_row(y: fx.Node) -> bool:
    known = value(y)
    return isinstance(known, Tensor) and all(type(s) is int and s == 1 for s in known.shape[:-1])


def _calls(node: Any, *targets: object) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


_RULES: tuple[tuple[tuple[Any, ...], Any], ...] = (
    (_QUANTIZES, _fuse_transform),
    ((ops.dequantize.default,), _fuse_linear),
    (_QUANTIZES, inline),
)
