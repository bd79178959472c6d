"""Determines which of its inputs a node may modify in place. An input counts as modified if this is
uncertain."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from qfx.graph.calls import call, inputs
from qfx.graph.capture import attribute, is_constant, value
from qfx.host.autograd import SET_GRAD_ENABLED
from qfx.host.operators import HigherOrderOperator, OpOverload, OpOverloadPacket, overloads, schema
from qfx.host.tensors import storage_id, tree_leaves

_AUGMENTED: set[Any] = {operator.setitem, operator.iadd, operator.isub, operator.imul}
_AUGMENTED |= {operator.itruediv, operator.ifloordiv, operator.ipow, operator.imatmul}
_AUGMENTED |= {operator.iand, operator.ior, operator.ixor, operator.imod}
# Functions with running statistics: the argument that makes them update these, and its default.
_UPDATES: dict[Any, tuple[str, bool]] = {
    F.batch_norm: ("training", False),
    F.instance_norm: ("use_input_stats", True),
}
# Functions whose names follow PyTorch's conventions: a trailing underscore, inplace=, out=.
_KNOWN_MODULES = ("torch", "_operator", "operator", "builtins", "math", "None")


def writes(node: fx.Node) -> bool:
    """Whether the node may modify one of its tensor inputs in place."""
    return bool(written_inputs(node))


def written_inputs(node: fx.Node) -> list[fx.Node]:
    """Returns the inputs that the node may modify."""
    if node.op == "call_method":
        name = str(node.target)
        return _leaves(node.args[:1]) if name == "__setitem__" or _in_place_name(name) else []
    if node.op == "call_module":
        return [] if _pure_module(node) else node.all_input_nodes
    return _written_by_function(node) if node.op == "call_function" else []


def _in_place_name(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _pure_module(node: fx.Node) -> bool:
    owner = node.graph.owning_module
    module = None if owner is None else owner.get_submodule(str(node.target))
    known = type(module).__module__.startswith("torch.nn.")
    return known and not getattr(module, "inplace", False)


def _written_by_function(node: fx.Node) -> list[fx.Node]:
    target: Any = node.target
    if isinstance(target, OpOverload):
        return _written_by_schema(node, schema(target))
    if isinstance(target, OpOverloadPacket):
        schemas = map(schema, overloads(target))
        return [a for each in schemas for a in _written_by_schema(node, each)]
    if isinstance(target, HigherOrderOperator):
        return _written_by_bodies(node)
    if not str(getattr(target, "__module__", None)).startswith(_KNOWN_MODULES):
        return node.all_input_nodes
    if _argument(node, "max_norm") is not None:  # embeddings renormalize their weight in place
        return node.all_input_nodes
    if target in _UPDATES and _updates(node, *_UPDATES[target]):
        return _leaves([_argument(node, name) for name in ("running_mean", "running_var")])
    in_place = _in_place_name(getattr(target, "__name__", "")) or target in _AUGMENTED
    in_place = in_place or _argument(node, "inplace") is True
    return _leaves(node.kwargs.get("out")) + (_leaves(node.args[:1]) if in_place else [])


def _updates(node: fx.Node, name: str, default: bool) -> bool:
    given = _argument(node, name)
    return default if given is None else given is not False


def _argument(node: fx.Node, name: str) -> Any:
    """Returns the argument `name` of a Python function, whether it is passed by name or by
    position, as in F.relu(x, inplace=True) and F.relu(x, True)."""
    names = getattr(getattr(node.target, "__code__", None), "co_varnames", ())
    at = names.index(name) if name in names else len(node.args)
    return node.args[at] if at < len(node.args) else node.kwargs.get(name)


def _leaves(value: Any) -> list[fx.Node]:
    return [a for a in tree_leaves(value) if isinstance(a, fx.Node)]


def _written_by_bodies(node: fx.Node) -> list[fx.Node]:
    """Returns the operands that a body (subgraph) of a higher-order operator writes. If it is not
    known which operand belongs to which placeholder, returns all inputs if a body writes
    anything."""
    found = call(node)
    if found is None:
        return node.all_input_nodes if _body_writes(node) else []
    written = [[p in written_roots(body.graph) for p in inputs(body)] for body in found.bodies]
    alike = zip(found.operands, *written, strict=True)
    return _leaves([operand for operand, *by_bodies in alike if any(by_bodies)])


def _body_writes(node: fx.Node) -> bool:
    """Whether a body of a higher-order operator writes anything. True also if there is no body to
    inspect."""
    inputs = [a for a in node.all_input_nodes if a.op == "get_attr"]
    bodies = [b for b in map(attribute, inputs) if isinstance(b, fx.GraphModule)]
    return not bodies or any(writes(n) for body in bodies for n in body.graph.nodes)


def _written_by_schema(node: fx.Node, of: Any) -> list[fx.Node]:
    if not of.is_mutable:
        return []
    found: list[fx.Node] = []
    for i, argument in enumerate(of.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            found += _leaves(given)
    return found


def nodes_in_transforms(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes inside a `torch.func` transform: jvp, vmap, grad."""
    depth, inside = 0, set()
    for node in graph.nodes:
        name = str(getattr(node.target, "__name__", "")) if node.op == "call_function" else ""
        depth += name.endswith("_increment_nesting")
        depth -= name.endswith("_decrement_nesting")
        if depth:
            inside.add(node)
    return inside


def without_gradients(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes inside a `torch.no_grad` region."""
    enabled, inside = True, set()
    for node in graph.nodes:
        if node.target is SET_GRAD_ENABLED:
            enabled = bool(node.args[0])
        elif not enabled:
            inside.add(node)
    return inside


def written_roots(graph: fx.Graph) -> set[fx.Node]:
    """Returns the inputs and constants of the graph that some node may write, directly, through a
    view or through another tensor in the same memory."""
    roots = {_root(a) for node in graph.nodes for a in written_inputs(node)}
    written = {_storage(root) for root in roots} - {None}
    sources = [n for n in graph.nodes if n.op in ("placeholder", "get_attr")]
    return roots | {n for n in sources if _storage(n) in written}


def written_constants(gm: fx.GraphModule) -> Callable[[Sequence[Any]], list[Any]]:
    """Returns, for a captured graph, a function that maps its arguments to the parameters and
    buffers that the graph may write."""
    written = written_roots(gm.graph)
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    at = [i for i, n in enumerate(placeholders) if n in written and is_constant(n)]
    attributes = [attribute(n) for n in written if n.op == "get_attr"]
    return lambda arguments: [*attributes, *(arguments[i] for i in at)]


def changed_between(first: fx.Node, last: fx.Node, read: Sequence[fx.Node]) -> fx.Node | None:
    """Returns a node between `first` and `last` that may modify one of the tensors `read`, also
    through a view, or through another input of the graph, because two inputs may share memory.
    Returns None if there is none."""
    roots = {_root(node) for node in read}
    memory = {_storage(root) for root in roots} - {None}
    given = any(root.op == "placeholder" for root in roots)
    node = first.next
    while node is not last:
        for written in map(_root, written_inputs(node)):
            shares = given and written.op == "placeholder"
            if shares or written in roots or _storage(written) in memory:
                return node
        node = node.next
    return None


def _storage(node: fx.Node) -> int | None:
    recorded = value(node)
    if not isinstance(recorded, torch.Tensor):
        return None
    return storage_id(recorded)


def _root(node: fx.Node) -> fx.Node:
    """Returns the node of which this node may be a view, and which is not a view itself. A node
    whose result has its own storage is not a view."""
    while node.op not in ("placeholder", "get_attr") and node.all_input_nodes:
        source = node.all_input_nodes[0]
        if None not in (storages := (_storage(node), _storage(source))) and len({*storages}) == 2:
            return node
        node = source
    return node
