"""Fuse: the canonical graph -> the fewest and fastest operators, with the same bits.

dequantize(int8_mm(quantize(x)))  ->  int8_linear_dynamic(x)      x read by one site
                                  ->  int8_linear(quantize(x))    x shared by several, unless it is
                                      one row: that is quantized anew in less time than a call takes
dequantize(int8_bmm(quantize(a), quantize(b)))  ->  int8_bmm_dynamic(a, b)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from qfx.canonical import emit, erase, finish
from qfx.capture import value
from qfx.fault import at

ops = torch.ops.qfx


def fuse(gm: fx.GraphModule) -> fx.GraphModule:
    """Edits the canonical graph of `qfx.canonical.rewrite` to its fused form and returns it."""
    graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
    for graph in graphs:
        for node in list(graph.nodes):
            if _calls(node, ops.dequantize.default):
                with at(node):
                    _fuse_linear(graph, node)
    finish(gm, graphs)
    return gm


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
    if not _calls(triple, ops.quantize.default) or not all(
        _calls(p, operator.getitem) and p.args == (triple, i) for i, p in enumerate(parts)
    ):
        return
    epilogue = (packed, w_scale, bias)
    if len(q.users) == 1 or _one_row(dequantize):
        x, *spec = triple.args
        call = (ops.int8_linear_dynamic.default, (x, *epilogue, *spec, activation, out_dtype))
    else:
        call = (ops.int8_linear.default, (*parts, *epilogue, activation, out_dtype))
    with graph.inserting_before(acc):
        fused = emit(graph, *call, f"{dequantize.name.removesuffix('_dequantize')}_int8")
    fused.meta = dict(dequantize.meta)
    dequantize.replace_all_uses_with(fused)
    erase(graph, dequantize, down_to={triple.args[0]})


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


def _calls(node: Any, target: object) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is target
