"""Access to undocumented attributes that FX and Dynamo store at nodes and graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

_OF_GRAPHS = ("_param_name_to_source", "_source_to_user_stacks")


def is_erased(node: fx.Node) -> bool:
    return node._erased


def source(node: fx.Node) -> Any:
    """Returns Dynamo's source of a graph input (the path by which Dynamo reached the value), or
    None outside Dynamo."""
    return getattr(node, "_dynamo_source", None)


def source_text(node: fx.Node) -> str | None:
    """Returns the Python expression of a node's source, or None outside Dynamo."""
    found = source(node)
    return None if found is None else str(found.name() if callable(found.name) else found.name)


def mark_as_new_input(node: fx.Node) -> None:
    """Marks a node as a static graph input without a source, because AOTAutograd looks for the
    source and the kind of every input."""
    node._dynamo_source = None  # type: ignore[attr-defined]
    node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}


def is_static_input(node: fx.Node) -> bool:
    """Whether Dynamo says that an input is the same tensor in every call."""
    return (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type") is not None


def copy_signature(of: fx.Graph, to: fx.Graph) -> None:
    """Copies the call signature that exported programs keep with the graph."""
    to.set_codegen(of._codegen)


def copy_annotations(of: fx.GraphModule, to: fx.GraphModule, nodes: Mapping[Any, Any]) -> None:
    """Copies the data that Dynamo stores at a graph module and at its nodes. `nodes`: old node ->
    new node."""
    for old, new in nodes.items():
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    for name in _OF_GRAPHS:
        if hasattr(of, name):
            setattr(to, name, getattr(of, name))
