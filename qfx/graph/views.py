"""Views: sequences of tensor methods, such as transpose and reshape, that turn a constant into a
matrix [N, K], or an activation into [..., K].

A view is a value: a tuple of steps, each a method's name and its arguments. It can be applied to a
tensor and emitted into a graph.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from qfx.graph.capture import is_constant, value
from qfx.host.tensors import tree_leaves

Step = tuple[str, tuple[Any, ...]]
View = tuple[Step, ...]
T: Step = ("t", ())
aten = torch.ops.aten


def apply(view: View, tensor: Tensor) -> Tensor:
    """Returns the tensor after the steps of the view."""
    for method, arguments in view:
        own = getattr(tensor, method, None)
        tensor = own(*arguments) if own is not None else _function(method)(tensor, *arguments)
    return tensor


def emit_view(view: View, node: fx.Node) -> fx.Node:
    """Emits the view of `node` as nodes at the graph's insertion point; returns the last one. The
    nodes call functions, because PyTorch's caches reject methods of nodes without recorded
    values."""
    for method, arguments in view:
        if method == "__getitem__":
            node = node.graph.call_function(operator.getitem, (node, *arguments))
        else:
            node = node.graph.call_function(_function(method), (node, *map(_listed, arguments)))
    return node


def _function(method: str) -> Any:
    """Returns the function that a step calls. `im2col` is an operator of qfx."""
    return torch.ops.qfx.im2col.default if method == "im2col" else getattr(aten, method)


def _listed(argument: Any) -> Any:
    """Returns a tuple of numbers as a list, as graphs have them."""
    return list(argument) if isinstance(argument, tuple) else argument


def then(view: View, *steps: Step) -> View:
    """Returns `view` followed by more steps; two transposes in a row cancel out."""
    for step in steps:
        view = view[:-1] if step == T and view[-1:] == (T,) else (*view, step)
    return view


def token(view: View) -> str:
    """Returns a short text for the names of new nodes: 't' for a transpose, '' for the empty
    view."""
    words = [method.strip("_") + "".join(map(_word, arguments)) for method, arguments in view]
    return "_".join(words)


def _word(argument: Any) -> str:
    return "".join(c if c.isalnum() else "_" for c in str(argument))


# --- from graphs: the constant at the start of a chain of views ---


def constant_behind(node: fx.Node) -> tuple[fx.Node, View] | str:
    """Returns the constant from which `node` is computed by views alone, and the view. Returns a
    reason if `node` is not computed in this way."""
    steps: list[Step] = []
    while not is_constant(node):
        found = _step(node)
        if found is None:
            what = "an input" if node.op == "placeholder" else f"computed by {node.name}"
            return f"the right operand is {what}, not a parameter, buffer or constant"
        node, more = found
        steps += reversed(more)
    return node, then((), *reversed(steps))


def _step(node: fx.Node) -> tuple[fx.Node, View] | None:
    """Returns (source, steps) of one view node, or None for any other node."""
    if node.op not in ("call_function", "call_method") or not node.args or {*node.kwargs} - {"dim"}:
        return None
    given: list[Any] = [*node.args, *node.kwargs.values()]  # dim comes last
    source, *arguments = given
    method = node.target if node.op == "call_method" else _METHODS.get(node.target)
    if not isinstance(source, fx.Node) or not _static(arguments):
        return None
    if method in _SAME:
        return source, ()
    name, rank = arguments[0] if method == "getattr" else method, _rank(source)
    if name in _TRANSPOSES:
        last = ("transpose", (-2, -1))  # of a stack of matrices
        return (source, (T if rank == 2 else last,)) if rank == 2 or name == "mT" else None
    if method in _CASTS:
        return (source, (("to", (value(node).dtype,)),)) if _casts(node, source) else None
    if method == "slice" and len(arguments) > 2:
        dim, *bounds = arguments
        return _indexed(source, (*[slice(None)] * dim, slice(*bounds)))
    if method == "__getitem__" and isinstance(arguments[0], slice | tuple):
        index = arguments[0] if isinstance(arguments[0], tuple) else (arguments[0],)
        if any(isinstance(part, slice) for part in index):
            return _indexed(source, index)
    if method not in _VIEWS:
        return None
    if method in _LISTS and all(isinstance(a, int) for a in arguments):
        arguments = [tuple(arguments)]  # permute(1, 0) and permute((1, 0))
    step: Step = (str(method), tuple(_hashable(a) for a in arguments))
    return source, (T if _transposes(step, _rank(source)) else step,)


_LISTS = ("permute", "reshape", "view")
_SAME = ("contiguous", "alias")
_CASTS = ("to", "type", "float", "bfloat16", "half", "type_as")
_TRANSPOSES = ("t", "T", "mT")
_VIEWS: tuple[str, ...] = ("transpose", "swapaxes", "swapdims", "permute")
_VIEWS += ("movedim", "reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze", "select")
_VIEWS += ("narrow", "chunk", "split", "split_with_sizes", "unbind", "__getitem__", "detach")


def _casts(node: fx.Node, source: fx.Node) -> bool:
    """Whether a node only casts `source` to a float dtype that is known: `.to(other)` and changes
    of the device are not steps."""
    before, after = value(source), value(node)
    if before is None or after is None or not isinstance(after, Tensor):
        return False
    dtypes = all(isinstance(a, torch.dtype) for a in node.args[1:])
    return dtypes and before.device == after.device and after.is_floating_point()


def _static(arguments: list[Any]) -> bool:
    leaves = tree_leaves(arguments)
    known = (int, str, slice, torch.dtype, type(None), type(...))
    return all(isinstance(a, known) and not isinstance(a, fx.Node) for a in leaves) and all(
        isinstance(i, int | None) for s in leaves if isinstance(s, slice) for i in _ends(s)
    )


def _indexed(source: fx.Node, index: tuple[Any, ...]) -> tuple[fx.Node, View] | None:
    """Returns (source, view) for an index like w[a:b, i], as one step for each axis, the last axis
    first. Returns None for an index of another kind."""
    shape = getattr(value(source), "shape", ())
    steps: list[Step] = []
    if len(index) > len(shape) or not all(isinstance(size, int) for size in shape):
        return None
    for dim, part in reversed([*enumerate(index)]):
        if isinstance(part, slice) and part.step in (None, 1):
            start, stop, _ = part.indices(shape[dim])
            steps.append(("narrow", (dim, start, max(stop - start, 0))))
        elif isinstance(part, int) and not isinstance(part, bool):
            steps.append(("select", (dim, part)))
        else:
            return None
    whole = [("narrow", (dim, 0, size)) for dim, size in enumerate(shape)]
    return source, tuple(step for step in steps if step not in whole)


def _ends(s: slice) -> tuple[Any, Any, Any]:
    return s.start, s.stop, s.step


def _hashable(argument: Any) -> Any:
    return tuple(map(_hashable, argument)) if isinstance(argument, list | tuple) else argument


def _rank(node: fx.Node) -> int:
    return getattr(value(node), "ndim", 2)


def _transposes(step: Step, rank: int) -> bool:
    """Whether the step swaps the axes of a matrix."""
    method, arguments = step
    if rank != 2 or method not in ("transpose", "swapaxes", "swapdims", "permute"):
        return False
    dims = arguments[0] if len(arguments) == 1 and isinstance(arguments[0], tuple) else arguments
    order = [d % 2 for d in dims]
    return order == [1, 0] if method == "permute" else sorted(order) == [0, 1]


_METHODS: dict[Any, str] = {
    getattr: "getattr",
    operator.getitem: "__getitem__",
    torch.t: "t",
    torch.transpose: "transpose",
    torch.swapaxes: "swapaxes",
    torch.swapdims: "swapdims",
    torch.permute: "permute",
    torch.movedim: "movedim",
    torch.reshape: "reshape",
    torch.flatten: "flatten",
    torch.squeeze: "squeeze",
    torch.unsqueeze: "unsqueeze",
    torch.select: "select",
    torch.narrow: "narrow",
    torch.chunk: "chunk",
    torch.split: "split",
    torch.unbind: "unbind",
    torch.detach: "detach",
    aten.t.default: "t",
    aten.numpy_T: "T",
    aten.numpy_T.default: "T",
    aten.mT: "mT",
    aten.mT.default: "mT",
    aten.swapaxes.default: "swapaxes",
    aten.swapdims.default: "swapdims",
    aten.transpose.int: "transpose",
    aten.permute.default: "permute",
    aten.view.default: "view",
    aten.reshape.default: "reshape",
    aten.squeeze.dim: "squeeze",
    aten.unsqueeze.default: "unsqueeze",
    aten.select.int: "select",
    aten.split_with_sizes.default: "split_with_sizes",
    aten.split.Tensor: "split",
    aten.unbind.int: "unbind",
    aten.to.dtype: "to",
    aten.slice.Tensor: "slice",
    aten.chunk.default: "chunk",
    aten.contiguous.default: "contiguous",
    aten.detach.default: "detach",
    aten.alias.default: "alias",
}
