"""Instructions for blocks of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from qfx.graph.activations import ACTIVATIONS
from qfx.ops.code import Code
from qfx.ops.experts import GATES
from qfx.programs.emit import EMIT, Emitter, Outside
from qfx.programs.linears import arguments, constant


def _experts(e: Emitter, node: fx.Node) -> None:
    operands = arguments(node)
    out = e.of(node)  # in float32, or PyTorch runs it
    x, routing = e.whole(operands["x"]), e.whole(operands["routing"])
    expert = e.whole(operands["expert"], torch.int64)
    if 0 in (*out.sizes, *expert.sizes):
        raise Outside
    gate = (list(ACTIVATIONS).index(operands["activation"]), GATES.index(operands["gate"]))
    size = float(operands["limit"]), float(operands["shift"])
    up, down = (_stack(e, operands, name) for name in ("up", "down"))
    code, down_code = Code(*operands["code"]), Code(*operands["down_code"])
    e("experts", out, x, expert, routing, *code, *gate, *size, *up, *down_code, *down)


def _stack(e: Emitter, operands: dict[str, Any], name: str) -> list[Any]:
    """Returns the parts of the weights of one product: `Stack` in
    csrc/cpu/program/experts.cpp."""
    bias = operands[f"{name}_bias"]
    packed = constant(e, operands[name], torch.int8)
    return [packed, *([0] if bias is None else [1, e.whole(bias)])]


EMIT |= {torch.ops.qfx.experts.default: _experts}
