"""The instructions of linears whose floats are quantized as they come."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from qfx.graph.activations import ACTIVATIONS
from qfx.host.operators import schema
from qfx.ops.code import Code
from qfx.programs.emitting import EMIT, Emitter, Outside, argument
from qfx.programs.words import Kind, Operand

ops = torch.ops.qfx


def arguments(node: fx.Node) -> dict[str, Any]:
    """Of a call of ours, by their names."""
    known = {a.name: a.default_value for a in schema(node.target).arguments}
    return known | dict(zip(known, node.args, strict=False)) | dict(node.kwargs)


def quantization(e: Emitter, node: fx.Node) -> dict[str, Any]:
    """The arguments of the `quantize` whose codes, scales and zero points a linear reads, where it
    finds the scales itself and what it reads is the same still."""
    given = arguments(node)
    parts = [given[name] for name in ("q", "scale", "zero_point")]
    if not all(isinstance(p, fx.Node) and p.target is operator.getitem for p in parts):
        raise Outside
    sources = {part.args[0] for part in parts}
    if len(sources) != 1 or [part.args[1] for part in parts] != [0, 1, 2]:
        raise Outside
    (source,) = sources
    if source.target is not ops.quantize.default:
        raise Outside
    how = arguments(source)
    if how["scale"] is not None or how["seed"] is not None:
        raise Outside
    read = [*parts, how["x"], *([] if how["factor"] is None else [how["factor"]])]
    if any(e.written_since(source, each) for each in read):
        raise Outside
    return how


def _quantized(e: Emitter, how: dict[str, Any]) -> tuple[Any, ...]:
    """What an instruction is told first: `Quantized` in csrc/cpu/program/linears.cpp."""
    factor = how["factor"]
    parts = [e.whole(how["x"]), *([0] if factor is None else [1, e.whole(factor)])]
    return (*parts, *Code(*how["code"]))


def _linear(e: Emitter, node: fx.Node) -> None:
    given = arguments(node)
    how = quantization(e, node) if "q" in given else given
    e("linear", *_quantized(e, how), 1, *_told(e, node, given))


def _told(e: Emitter, node: fx.Node, given: dict[str, Any]) -> tuple[Any, ...]:
    """Of one weight: `Told`."""
    end, activation = _activated(node, given["activation"])
    if end is not node:
        e.ends[node] = end
    bias = [0] if given["bias"] is None else [1, e.whole(given["bias"])]
    weight = _constant(e, given["weight"], torch.int8)
    return (e.of(end), *bias, list(ACTIVATIONS).index(activation), weight)


def _activated(node: fx.Node, activation: str) -> tuple[fx.Node, str]:
    """The activation that alone reads a linear without one, as its epilogue computes it. (E2)"""
    if activation == "none" and len(node.users) == 1:
        (user,) = node.users
        for name, known in ACTIVATIONS.items():
            settings = {k: argument(user, 1, k, "none") for k in known.settings}
            if user.target in known.spelled and settings == known.settings:
                return user, name
    return node, activation


def _constant(e: Emitter, node: Any, dtype: torch.dtype) -> Operand:
    """What is known when the program is made."""
    found = e.of(node, dtype)
    if found.region.kind is not Kind.CONSTANT or not found.contiguous:
        raise Outside
    return found


EMIT |= {ops.linear_dynamic.default: _linear, ops.linear.default: _linear}
