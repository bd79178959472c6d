"""Decomposes operators that contain several matmuls, such as multi-head attention, into the nodes
that they consist of.

The operator's own Python definition is run on the node's recorded (fake) values, and every PyTorch
function that it calls is written into the graph. Symbolic sizes become nodes that compute them from
the sizes of the operands.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from qfx.graph.capture import NAMED, value
from qfx.graph.faults import at
from qfx.graph.recurrent_bodies import BODIES as RECURRENT
from qfx.host.operators import ENCODER_LAYER
from qfx.host.shapes import compute, hint
from qfx.host.tensors import is_fake, symbolic_dispatch, tree_leaves, tree_map

aten = torch.ops.aten
_NUMBERS = (torch.SymInt, torch.SymFloat)


def open_operators(
    gm: fx.GraphModule, stays: Callable[[fx.Node], bool] = lambda node: False
) -> fx.GraphModule:
    """Decomposes such operators in the graph of `gm` and in the subgraphs in it; a node that cannot
    be decomposed or that `stays` stays. A graph without such operators is not recompiled:
    calibration calls this with every batch."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            closed = [n for n in module.graph.nodes if n.op == "call_function" and _closed(n)]
            closed = [n for n in closed if not stays(n)]
            for node in closed:
                with at(node):
                    _open(node, _BODIES[node.target])
            if closed:
                module.recompile()
    return gm


def _closed(node: fx.Node) -> bool:
    return node.target in _BODIES and _known(node)


def _known(node: fx.Node) -> bool:
    """Whether all values of the node are recorded, with sizes that can be computed from the sizes
    of its operands."""
    operands = [value(n) for n in node.all_input_nodes]
    tensors = [v for v in operands if not isinstance(v, _NUMBERS)]
    tensors += [v for v in tree_leaves(value(node)) if v is not None]
    if not all(isinstance(t, Tensor) for t in tensors) or len(_fake_modes(tensors)) > 1:
        return False
    symbolic = [s for t in tensors for s in (*t.shape, *t.stride()) if isinstance(s, torch.SymInt)]
    symbols = {symbol for size in symbolic for symbol in size.node.expr.free_symbols}
    return all(hint(s) is not None for s in symbolic) and symbols <= {*_axes(node.all_input_nodes)}


def _axes(operands: Iterable[fx.Node]) -> dict[Any, tuple[fx.Node, int]]:
    """Returns, for each symbol that is the size of an operand's axis, the operand and the axis."""
    return {
        size.node.expr: (operand, axis)
        for operand in operands
        for axis, size in enumerate(getattr(value(operand), "shape", ()))
        if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol
    }


def _fake_modes(tensors: Any) -> list[Any]:
    return list({id(t.fake_mode): t.fake_mode for t in tensors if is_fake(t)}.values())


def _open(node: fx.Node, body: Callable[..., Any]) -> None:
    values, before = {n: value(n) for n in node.all_input_nodes}, node.prev
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    records = any(getattr(t, "requires_grad", False) for t in tree_leaves(value(node)))
    (fake_mode,) = _fake_modes(values.values()) or (nullcontext(),)
    with node.graph.inserting_before(node):
        recorder = _Recorder(node, {id(v): n for n, v in values.items()})
        symbolic = symbolic_dispatch()  # C++ rejects symbolic sizes for some operators
        with torch.set_grad_enabled(records), fake_mode, symbolic, recorder:
            result = body(*args, **kwargs)
    if result is NotImplemented:
        while node.prev is not before:
            node.graph.erase_node(node.prev)
        return
    _replace(node, recorder, result)


def _replace(node: fx.Node, recorder: _Recorder, result: Any) -> None:
    if isinstance(result, Tensor):
        node.replace_all_uses_with(recorder.nodes[id(result)])
    for user in list(node.users):  # getitem nodes of a tuple
        part = result[user.args[1]]
        if isinstance(part, Tensor):
            user.replace_all_uses_with(recorder.nodes[id(part)])
            node.graph.erase_node(user)
    if not node.users:
        node.graph.erase_node(node)


_INHERITED = ("nn_module_stack", "stack_trace", "source_fn_stack", NAMED)


class _Recorder(TorchFunctionMode):
    """A mode that writes each call of a PyTorch function that returns tensors into the graph of
    `source`."""

    def __init__(self, source: fx.Node, nodes: dict[int, fx.Node]) -> None:
        super().__init__()
        self.graph, self.nodes = source.graph, nodes
        self.meta = {key: source.meta[key] for key in _INHERITED if key in source.meta}
        self.kept: list[Any] = []  # keeps results alive so that no id is used twice
        self.axes, self.sizes = _axes(source.all_input_nodes), dict[Any, Any]()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tree_map(self._node_of, (tuple(args), kwargs))
        result = func(*args, **kwargs)
        if any(isinstance(t, Tensor) for t in tree_leaves(result)):
            self._bind(result, self._emit(func, *given))
        return result

    def _node_of(self, argument: Any) -> Any:
        if isinstance(argument, torch.Size):
            return tuple(map(self._node_of, argument))
        if not isinstance(argument, (Tensor, *_NUMBERS)):
            return argument
        if id(argument) not in self.nodes and isinstance(argument, torch.SymInt):
            return self._size(argument.node.expr)
        return self.nodes.get(id(argument), argument)

    def _size(self, expression: Any) -> Any:
        """Returns a symbolic size as a node, or as a number if it has become one."""
        if expression not in self.sizes:
            tracer = fx.proxy.GraphAppendingTracer(self.graph)
            axes = {
                symbol: fx.Proxy(self._axis(symbol), tracer) for symbol in expression.free_symbols
            }
            size = compute(expression, axes)
            self.sizes[expression] = size.node if isinstance(size, fx.Proxy) else size
        return self.sizes[expression]

    def _axis(self, symbol: Any) -> fx.Node:
        if symbol not in self.sizes:
            self.sizes[symbol] = self.graph.call_function(aten.sym_size.int, self.axes[symbol])
        return self.sizes[symbol]

    def _emit(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        if isinstance(func, types.MethodDescriptorType) or func in _PYTHON_METHODS:
            return self._new(self.graph.call_method(func.__name__, args, kwargs))
        if getattr(func, "__name__", "") == "__get__":
            return self._new(self.graph.call_function(getattr, (*args[:1], func.__self__.__name__)))
        return self._new(self.graph.call_function(func, args, kwargs))

    def _new(self, node: fx.Node) -> fx.Node:
        node.meta.update(self.meta)
        return node

    def _bind(self, result: Any, node: fx.Node) -> None:
        node.meta["example_value"] = result
        self.kept.append(result)
        if isinstance(result, Tensor):
            self.nodes[id(result)] = node
            return
        for i, part in enumerate(result):
            if isinstance(part, Tensor):
                self._bind(part, self._new(self.graph.call_function(operator.getitem, (node, i))))


_PYTHON_METHODS = [f for f in vars(Tensor).values() if isinstance(f, types.FunctionType)]


def _without_overrides(function: Any) -> Any:
    """Returns a copy of a function of torch.nn.functional that does not call the override mode for
    itself, only for the functions that it calls."""
    names = {**function.__globals__, "has_torch_function": lambda arguments: False}
    copy = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _encoder_layer(
    x: Tensor, width: int, heads: int, qkv_w: Tensor, qkv_b: Tensor, out_w: Tensor, out_b: Tensor,
    use_gelu: bool, norm_first: bool, eps: float, norm1_w: Tensor, norm1_b: Tensor,
    norm2_w: Tensor, norm2_b: Tensor, up_w: Tensor, up_b: Tensor, down_w: Tensor, down_b: Tensor,
    mask: Tensor | None = None, mask_type: int | None = None,
) -> Any:  # fmt: skip
    """Computes nn.TransformerEncoderLayer in inference, batch first. Returns NotImplemented if
    there is a mask."""
    if mask is not None or x.dim() != 3:
        return NotImplemented

    def norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(x, (width,), w, b, eps)

    def attend(x: Tensor) -> Tensor:
        q, k, v = F.linear(x, qkv_w, qkv_b).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return F.linear(y, out_w, out_b)

    def feed(x: Tensor) -> Tensor:
        h = F.linear(x, up_w, up_b)
        return F.linear(F.gelu(h) if use_gelu else F.relu(h), down_w, down_b)

    if norm_first:
        x = x + attend(norm(x, norm1_w, norm1_b))
        return x + feed(norm(x, norm2_w, norm2_b))
    x = norm(x + attend(x), norm1_w, norm1_b)
    return norm(x + feed(x), norm2_w, norm2_b)


_BODIES: dict[Any, Callable[..., Any]] = {
    F.multi_head_attention_forward: _without_overrides(F.multi_head_attention_forward),
    ENCODER_LAYER: _encoder_layer,
    **RECURRENT,
}
