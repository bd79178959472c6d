"""Instructions for linears that quantize their float input."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from qfx.graph.activations import ACTIVATIONS
from qfx.host.operators import schema
from qfx.ops.code import Code
from qfx.programs.bytecode import Operand
from qfx.programs.emit import EMIT, Emitter, Outside, argument
from qfx.programs.memory import RegionKind

ops = torch.ops.qfx


def arguments(node: fx.Node) -> dict[str, Any]:
    """Returns the arguments of a call of an operator of qfx by name, with defaults."""
    known = {a.name: a.default_value for a in schema(node.target).arguments}
    return known | dict(zip(known, node.args, strict=False)) | dict(node.kwargs)


def _linear(e: Emitter, node: fx.Node) -> None:
    operands = arguments(node)
    weight, bias, activation = operands["weight"], operands["bias"], operands["activation"]
    args = _linear_args(e, node, e.values[node], weight, bias, activation)
    e("linear", *_quantization(e, operands), 1, *args)


def _linears(e: Emitter, node: fx.Node) -> None:
    operands, results = arguments(node), e.values[node]
    parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    each = zip(operands["weight"], operands["bias"], operands["activation"], strict=True)
    args = [
        _linear_args(e, parts.get(i), results[i], *operands)
        for i, operands in enumerate(each)
        if results[i].numel()
    ]
    if args:
        e("linear", *_quantization(e, operands), len(args), *(part for own in args for part in own))


def _quantization(e: Emitter, operands: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the first parts of a linear instruction, x and how it is quantized: `Quantization` in
    csrc/cpu/program/linears.cpp."""
    factor = operands["factor"]
    parts = [e.whole(operands["x"]), *([0] if factor is None else [1, e.whole(factor)])]
    return (*parts, *Code(*operands["code"]))


def _linear_args(
    e: Emitter, node: fx.Node | None, result: Tensor, weight: Any, bias: Any, activation: str
) -> tuple[Any, ...]:
    """Returns the parts of a linear instruction for one weight and its result: `LinearArgs` in
    csrc/cpu/program/linears.cpp. `node`: the node of `result`, or None if no node reads it."""
    if node is not None:
        end, activation = _activated(node, activation)
        if end is not node:
            e.ends[node], result = end, e.values[end]
    added = [0] if bias is None else [1, e.whole(bias)]
    packed = constant(e, weight, torch.int8)
    return (e.of_value(result), *added, list(ACTIVATIONS).index(activation), packed)


def _activated(node: fx.Node, activation: str) -> tuple[fx.Node, str]:
    """Returns the node and the name of the activation function that a linear can compute as its
    epilogue, if it has none yet and an activation function is its only reader; otherwise `node` and
    `activation`. Equation (E2)."""
    if activation == "none" and len(node.users) == 1:
        (user,) = node.users
        for name, known in ACTIVATIONS.items():
            settings = {k: argument(user, i, k, "none") for i, k in enumerate(known.settings, 1)}
            if user.target in known.spelled and settings == known.settings:
                return user, name
    return node, activation


def constant(e: Emitter, node: Any, dtype: torch.dtype) -> Operand:
    """Returns the operand of a value that is known when the program is made."""
    found = e.of(node, dtype)
    if found.region.kind is not RegionKind.CONSTANT or not found.contiguous:
        raise Outside
    return found


EMIT |= {ops.linear_dynamic.default: _linear, ops.linears.default: _linears}
