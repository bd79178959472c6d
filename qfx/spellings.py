"""The ways a graph can spell a matmul, each normalised to one form.

A row says: these targets, with these argument names, are `act(x @ W + bias)` with these operands,
or a reason why qfx leaves the node alone. Nothing here edits a graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from qfx.capture import is_constant, value

aten = torch.ops.aten


@dataclass(frozen=True)
class Operands:
    """x @ right (+ bias); `right` is stored [N, K] when `right_is_nk`, else [K, N]."""

    x: fx.Node
    right: fx.Node
    right_is_nk: bool
    bias: fx.Node | None = None


Arguments = dict[str, Any]
Parse = Callable[[Arguments], "Operands | str"]


@dataclass(frozen=True)
class Spelling:
    """One row: call targets (functions, `.name` for a tensor method) and their argument names."""

    targets: tuple[Any, ...]
    names: tuple[str, ...]
    parse: Parse


def _linear(a: Arguments) -> Operands | str:
    return Operands(a["x"], a["w"], True, a.get("bias"))


def _matmul(a: Arguments) -> Operands | str:
    return Operands(a["x"], a["w"], False)


def _addmm(a: Arguments) -> Operands | str:
    if a.get("beta", 1) != 1 or a.get("alpha", 1) != 1:
        return f"addmm with beta={a.get('beta', 1)} and alpha={a.get('alpha', 1)}, not 1 and 1"
    return Operands(a["x"], a["w"], False, a["bias"])


def _not_yet(what: str) -> Parse:
    return lambda a: f"{what} is not supported yet"


_MM = ("x", "w")
_ADDMM = ("bias", "x", "w", "beta", "alpha")
_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)  # the same objects as torch.conv1d and so on
_FUSED: tuple[Any, ...] = (
    F.bilinear,
    F.multi_head_attention_forward,
    torch._transformer_encoder_layer_fwd,
)
_FUSED += (torch._native_multi_head_attention, torch.inner, torch.tensordot, torch.addbmm)
_FUSED += (torch.gru_cell, torch.lstm_cell, torch.lstm, torch.gru, torch.rnn_tanh, torch.mv)
_FUSED += (torch.rnn_relu, torch.rnn_tanh_cell, torch.rnn_relu_cell, torch._int_mm, torch.dot)
_FUSED += (torch.chain_matmul, torch.linalg.multi_dot, torch.linalg.matmul, torch.addmv)
_FUSED += (F.conv_transpose1d, F.conv_transpose2d, torch.outer, torch.kron, torch.vdot, torch.cdist)
_FUSED += (".inner", ".mv", ".dot", ".addmv", ".addbmm", ".addmm_", ".__rmatmul__")
_FUSED += (torch._grouped_mm,) if hasattr(torch, "_grouped_mm") else ()
_BATCHED = "a batched matmul of two activations"
ROWS = (
    # linear(x, W_nk, b)
    Spelling((F.linear, aten.linear.default), ("x", "w", "bias"), _linear),
    # x @ W_kn
    Spelling(
        (torch.matmul, operator.matmul, ".matmul", ".__matmul__", aten.matmul.default),
        _MM,
        _matmul,
    ),
    Spelling(
        (torch.mm, ".mm", aten.mm.default),
        _MM,
        _matmul,
    ),
    # b + x @ W_kn
    Spelling((torch.addmm, ".addmm", aten.addmm.default), _ADDMM, _addmm),
    Spelling((torch.bmm, ".bmm", aten.bmm.default), _MM, _not_yet(_BATCHED)),
    Spelling((torch.baddbmm, ".baddbmm", aten.baddbmm.default), _ADDMM, _not_yet(_BATCHED)),
    Spelling((torch.einsum, aten.einsum.default), (), _not_yet("einsum")),
    Spelling(
        (F.scaled_dot_product_attention, aten.scaled_dot_product_attention.default),
        (),
        _not_yet("attention"),
    ),
    Spelling(
        (*_CONVOLUTIONS, aten.conv1d.default, aten.conv2d.default, aten.convolution.default),
        (),
        _not_yet("convolution"),
    ),
    Spelling(_FUSED, (), _not_yet("this operator with a matmul inside")),
)
TABLE = {target: row for row in ROWS for target in row.targets}
# What the callables name their operands, in our words.
_SYNONYMS = {"input": "x", "self": "x", "mat1": "x", "weight": "w", "other": "w", "mat2": "w"}
_ADDMM_SYNONYMS = {**_SYNONYMS, "input": "bias", "self": "bias"}


def spelling(node: fx.Node) -> Spelling | None:
    """The row that describes the node, None when it is no matmul."""
    if node.op == "call_method":
        return TABLE.get(f".{node.target}")
    return TABLE.get(node.target) if node.op == "call_function" else None


def operands(node: fx.Node, row: Spelling) -> Operands | str:
    """The operands of a matmul-like node, or the reason why it stays as it is."""
    synonyms = _ADDMM_SYNONYMS if row.names is _ADDMM else _SYNONYMS
    arguments = dict(zip(row.names, node.args, strict=False))
    for name, argument in node.kwargs.items():
        if name == "out" and argument is not None:
            return "writes its result into out="
        arguments[synonyms.get(name, name)] = argument
    found = row.parse(arguments)
    if isinstance(found, str):
        return found
    if not (isinstance(found.x, fx.Node) and isinstance(found.right, fx.Node)):
        return "an operand is not a tensor of the graph"
    return found


def weight_root(node: fx.Node) -> tuple[fx.Node, bool] | str:
    """Follows transposes: (the constant [A, B], whether `node` is its transpose), or a reason."""
    transposed = False
    while not is_constant(node):
        step = _transpose_step(node)
        if step is None:
            what = "an input" if node.op == "placeholder" else f"computed by {node.name}"
            return f"the right operand is {what}, not a parameter, buffer or constant"
        node, swaps = step
        transposed ^= swaps
    return node, transposed


def _transpose_step(node: fx.Node) -> tuple[fx.Node, bool] | None:
    """(source, True) for a transpose of a matrix, (source, False) for a plain alias of one."""
    if node.op not in ("call_function", "call_method") or not node.args:
        return None
    source, *rest = node.args
    if not isinstance(source, fx.Node):
        return None
    rank = getattr(value(source), "ndim", 2)
    name = node.target if node.op == "call_method" else _FUNCTION_NAMES.get(node.target)
    if name == "getattr":
        return (source, True) if rest and rest[0] in ("T", "mT") and rank == 2 else None
    if name == "t" and rank == 2:
        return source, True
    dims = rest[0] if len(rest) == 1 and isinstance(rest[0], list | tuple) else rest
    if name in ("transpose", "swapaxes", "swapdims", "permute") and rank == 2 and len(dims) == 2:
        order = [d % 2 for d in dims if isinstance(d, int)]
        swaps = len(set(order)) == 2 and (name != "permute" or order == [1, 0])
        return (source, swaps) if len(order) == 2 else None
    return (source, False) if name in ("contiguous", "detach", "alias") else None


_FUNCTION_NAMES = {
    getattr: "getattr",
    torch.t: "t",
    torch.transpose: "transpose",
    torch.swapaxes: "swapaxes",
    torch.swapdims: "swapdims",
    torch.permute: "permute",
    torch.detach: "detach",
    aten.t.default: "t",
    aten.numpy_T.default: "t",
    aten.mT.default: "t",
    aten.swapaxes.default: "swapaxes",
    aten.swapdims.default: "swapdims",
    aten.transpose.int: "transpose",
    aten.permute.default: "permute",
    aten.contiguous.default: "contiguous",
    aten.detach.default: "detach",
    aten.alias.default: "alias",
}
