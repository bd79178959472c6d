"""The ways in which a graph can express a matmul, each normalized to one form.

The common form is `act(x @ W + bias)`. The table ROWS has a row (`Spelling`) for each way. A row
lists functions and the names of their arguments. If a node calls one of these functions, the row's
`parse` returns the operands x, W and bias of the common form, or the reason why qfx leaves the node
alone. Nothing here edits a graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from qfx.graph.capture import value
from qfx.graph.views import Step, T
from qfx.host.operators import GROUPED_MATMULS, UNNAMED_MATMULS, overloads
from qfx.match.attention import NAMES as ATTENTION_NAMES
from qfx.match.attention import attention
from qfx.match.base import Match
from qfx.match.contractions import Operands, einsum, is_known, is_weight, left
from qfx.match.convolutions import (
    ATEN_CONVOLUTION_NAMES,
    CONVOLUTION_NAMES,
    FUNCTIONS,
    TRANSPOSED_FUNCTIONS,
    TRANSPOSED_NAMES,
    convolution,
    transposed,
)
from qfx.match.experts import ExpertRows
from qfx.match.products import added_product, product
from qfx.match.recurrent import WHOLE
from qfx.match.stacked_weights import multiplied, stacked_einsum

aten = torch.ops.aten


Arguments = dict[str, Any]
Parse = Callable[[fx.Node, Arguments], Operands | Match | str]


@dataclass(frozen=True)
class Spelling:
    """One way to write a matmul, a row of ROWS: call targets (functions, or `.name` for a tensor
    method) and their argument names. `parse` returns the operands of a call, or the reason why qfx
    leaves it alone."""

    targets: tuple[Any, ...]
    names: tuple[str, ...]
    parse: Parse


def _linear(node: fx.Node, a: Arguments) -> Operands | str:
    return Operands(a["x"], a["w"], (), a.get("bias"))


def _matmul(node: fx.Node, a: Arguments) -> Operands | Match | str:
    if found := multiplied(node, a["x"], a["w"]):
        return found
    if any(is_weight(a.get(name)) and _rank(a[name]) > 2 for name in _MM):
        return product(node, a["x"], a["w"], "")  # a matrix for each batch: quantized at each call
    if is_known(a.get("x")) and not is_known(a.get("w")) and isinstance(a["w"], fx.Node):
        return left(node, a["x"], a["w"])
    if is_weight(a["w"]) and (rank := _rank(a["w"])) != 2:
        return f"the weight has {rank} dimensions, not 2"
    return Operands(a["x"], a["w"], (T,))


def _rank(weight: Any) -> int:
    return getattr(value(weight), "ndim", 2)


def _reversed(node: fx.Node, a: Arguments) -> Operands | Match | str:
    return _matmul(node, {"x": a["w"], "w": a["x"]})


def _addmm(node: fx.Node, a: Arguments) -> Operands | str:
    if a.get("beta", 1) != 1 or a.get("alpha", 1) != 1:
        return f"addmm with beta={a.get('beta', 1)} and alpha={a.get('alpha', 1)}, not 1 and 1"
    return Operands(a["x"], a["w"], (T,), a["bias"])


def _einsum(node: fx.Node, a: Arguments) -> Operands | Match | str:
    operands = tuple(node.args[1:]) or (a.get("operands"),)
    return stacked_einsum(node, a.get("equation"), operands) or einsum(
        node, a.get("equation"), operands
    )


def _grouped(node: fx.Node, a: Arguments) -> Operands | str:
    """Parses x [R, K] @ W [E, K, N], with rows sorted by expert."""
    offsets = a.get("offs")
    if not isinstance(offsets, fx.Node) or not is_weight(a.get("w")) or _rank(a["w"]) != 3:
        return "a grouped matmul that is no product of rows with the weights of experts"
    if a.get("bias") is not None:
        return "a grouped matmul with a bias"
    if a.get("out_dtype") not in (None, getattr(value(node), "dtype", None)):
        return f"a grouped matmul with out_dtype={a['out_dtype']}"
    return Operands(a["x"], a["w"], (_SWAP,), rows=ExpertRows(offsets))


def _steps(node: fx.Node, a: Arguments) -> Operands:
    """Parses h [B, K] @ W [N, K].T + bias, of the first step of a recurrent layer."""
    return Operands(a["h"], a["w"], (), a.get("bias"), steps=a)


def _not_yet(what: str) -> Parse:
    return lambda node, a: node.meta.get(WHOLE) or f"{what} is not supported yet"


_MM = ("x", "w")
_SWAP: Step = ("transpose", (-1, -2))
_ADDMM = ("bias", "x", "w", "beta", "alpha")
_FUSED: tuple[Any, ...] = (
    F.bilinear,
    F.multi_head_attention_forward,
    *UNNAMED_MATMULS,
)
_FUSED += (torch.inner, torch.tensordot, torch.addbmm)
_FUSED += (torch.gru_cell, torch.lstm_cell, torch.lstm, torch.gru, torch.rnn_tanh, torch.mv)
_FUSED += (torch.rnn_relu, torch.rnn_tanh_cell, torch.rnn_relu_cell, torch.dot)
_FUSED += (torch.chain_matmul, torch.linalg.multi_dot, torch.addmv)
_FUSED += (torch.outer, torch.kron, torch.vdot, torch.cdist)
_FUSED += (torch.ger, torch.addr, torch.linalg.vecdot)
_FUSED += (".inner", ".mv", ".dot", ".addmv", ".addbmm", ".addmm_", ".outer", ".ger", ".addr")
_IN_ATEN = (  # the same operators in exported graphs
    "inner tensordot addbmm mv dot outer ger addr kron vdot cdist bilinear chain_matmul addmv "
    "linalg_multi_dot linalg_vecdot gru lstm "
    "rnn_tanh rnn_relu gru_cell lstm_cell rnn_tanh_cell rnn_relu_cell"
)
_FUSED += tuple(t for name in _IN_ATEN.split() for t in overloads(getattr(aten, name)))
_ATEN_CONVOLUTIONS: tuple[Any, ...] = (
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
)
_ATEN_CONVOLUTIONS += (aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding)
_ATEN_TRANSPOSED: tuple[Any, ...] = (
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
)
ROWS = (
    # linear(x, W_nk, b)
    Spelling((F.linear, aten.linear.default), ("x", "w", "bias"), _linear),
    # x @ W_kn
    Spelling(
        (torch.matmul, operator.matmul, ".matmul", ".__matmul__", aten.matmul.default),
        _MM,
        _matmul,
    ),
    Spelling((torch.linalg.matmul, aten.linalg_matmul.default), _MM, _matmul),
    Spelling((".__rmatmul__",), _MM, _reversed),
    Spelling(
        (torch.mm, ".mm", aten.mm.default),
        _MM,
        _matmul,
    ),
    # b + x @ W_kn
    Spelling((torch.addmm, ".addmm", aten.addmm.default), _ADDMM, _addmm),
    # a @ b, alpha a @ b + beta c, of activations
    Spelling((torch.bmm, ".bmm", aten.bmm.default), _MM, _matmul),
    Spelling((torch.baddbmm, ".baddbmm", aten.baddbmm.default), _ADDMM, added_product),
    Spelling((torch.einsum, aten.einsum.default), ("equation",), _einsum),
    # softmax(q @ k.T) @ v
    Spelling(
        (F.scaled_dot_product_attention, aten.scaled_dot_product_attention.default),
        ATTENTION_NAMES,
        attention,
    ),
    # windows times W_ok
    Spelling((*FUNCTIONS, *_ATEN_CONVOLUTIONS), CONVOLUTION_NAMES, convolution),
    Spelling((aten.convolution.default,), ATEN_CONVOLUTION_NAMES, convolution),
    Spelling((*TRANSPOSED_FUNCTIONS, *_ATEN_TRANSPOSED), TRANSPOSED_NAMES, transposed),
    # rows sorted by expert, times the W_kn of each
    Spelling(GROUPED_MATMULS, ("x", "w", "offs", "bias", "out_dtype"), _grouped),
    # the steps of a recurrent layer, of which each multiplies by W_nk
    Spelling((torch.ops.qfx.lstm_float.default,), ("x", "w", "bias", "h", "c", "reverse"), _steps),
    Spelling((torch.ops.qfx.gru_float.default,), ("x", "w", "bias", "h", "reverse"), _steps),
    Spelling(_FUSED, (), _not_yet("this operator with a matmul inside")),
)
TABLE = {target: row for row in ROWS for target in row.targets}
assert len(TABLE) == sum(len(set(row.targets)) for row in ROWS), "a call stands in two rows"
# Operators of other libraries, which this one does not import.
_BY_NAME = {
    f"transformers.grouped_mm_fallback{overload}": TABLE[GROUPED_MATMULS[0]]
    for overload in ("", ".default")
}
# The callables' names for their operands -> ours.
_SYNONYMS = {
    "input": "x",
    "self": "x",
    "mat1": "x",
    "weight": "w",
    "other": "w",
    "mat2": "w",
    "batch1": "x",
    "batch2": "w",
    "mat_a": "x",
    "mat_b": "w",
}
_ADDMM_SYNONYMS = {**_SYNONYMS, "input": "bias", "self": "bias"}


def register_matmul(
    target: Any, names: tuple[str, ...] = ("x", "w", "bias"), *, weight: str = "nk"
) -> None:
    """Declares that calls of `target` are linears, so that they can become int8.

        qfx.register_matmul(torch.ops.library.linear, ("x", "w", "bias"))

    `target`: a function that Dynamo leaves in the graph, such as an operator of another library,
    `torch.ops.library.name`, with all its overloads. `names`: the meaning of its arguments, in
    order: "x" [..., K], "w" and optionally "bias" [N]. `weight`: the layout of w, "nk" for x @ w.T,
    "kn" for x @ w. The call must compute exactly this. Raises ValueError for other names, and for a
    target that is already registered.
    """
    if sorted(names) not in (["w", "x"], ["bias", "w", "x"]) or weight not in ("nk", "kn"):
        raise ValueError(
            f"register_matmul: names={names} and weight={weight!r}; expected x, w and perhaps bias "
            "in the order of the arguments, and nk or kn"
        )
    targets = (target, *overloads(target))
    if known := [t for t in targets if t in TABLE]:
        raise ValueError(f"register_matmul: {known[0]} is known already")
    view = (T,) if weight == "kn" else ()

    def parse(node: fx.Node, a: Arguments) -> Operands | str:
        if unknown := sorted(a.keys() - set(names)):
            return f"an argument {unknown[0]!r} that was not registered"
        return Operands(a["x"], a["w"], view, a.get("bias"))

    TABLE.update(dict.fromkeys(targets, Spelling(targets, names, parse)))


def spelling(node: fx.Node) -> Spelling | None:
    """Returns the row of the table that describes the node, or None if the node is no matmul."""
    if node.op == "call_method":
        return TABLE.get(f".{node.target}")
    if node.op != "call_function":
        return None
    return TABLE.get(node.target) or _BY_NAME.get(str(node.target))


def operands(node: fx.Node, row: Spelling) -> Operands | Match | str:
    """Returns the operands of a node that contains a matmul, or the reason why the node stays as it
    is."""
    synonyms = _ADDMM_SYNONYMS if row.names is _ADDMM else _SYNONYMS
    arguments = dict(zip(row.names, node.args, strict=False))
    for name, argument in node.kwargs.items():
        if name == "out" and argument is not None:
            return "writes its result into out="
        arguments[synonyms.get(name, name)] = argument
    found = row.parse(node, arguments)
    if not isinstance(found, Operands):
        return found
    if not (isinstance(found.x, fx.Node) and isinstance(found.right, fx.Node)):
        return "an operand is not a tensor of the graph"
    return found
