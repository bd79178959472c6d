"""Capture: converts an nn.Module, FX GraphModule or Dynamo graph to a GraphModule that qfx may
edit.

A Dynamo graph is cloned, never edited in place: Dynamo reads the metadata of its own placeholders
after the backend returns.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.export import ExportedProgram

from qfx.graph.activations import ACTIVATIONS
from qfx.host import nodes
from qfx.host.source_text import released_source_texts
from qfx.host.tensors import propagate_shapes

NAMED = "qfx_named"  # metadata: the name found for a constant or for the calling module
SCHEME = "qfx_scheme"  # metadata: the scheme of the module of `qfx.nn` that makes the call
OUTER = "qfx_outer"  # metadata of a body's placeholder: the constants it stands for
REPACKED = "qfx_repacked"  # metadata of a graph input: why the graph packs it at every call
_NO_PREFIXES: Mapping[str, str] = {}
_ROOT = re.compile(r"[LG]\['([^']*)'\]")
_PART = re.compile(r"""(\.?)('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\w+)(\(?)""")
_BETWEEN = {"_modules", "_parameters", "_buffers", "cell_contents"}  # between holder and content


class Tracer(fx.Tracer):
    """A symbolic tracer that traces into nn.Linear, convolutions, activations and batch norms with
    constant statistics: each becomes one function node."""

    opened: tuple[type[nn.Module], ...] = (
        nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d,
        nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
        *(row.module for row in ACTIVATIONS.values() if row.module),
    )  # fmt: skip

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        opened = isinstance(m, self.opened) or _is_constant_norm(m)
        return not opened and super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        forward = partial(_constant_norm, m) if _is_constant_norm(m) else forward
        return super().call_module(m, forward, args, kwargs)


def _is_constant_norm(m: nn.Module) -> bool:
    known = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return type(m) in known and not m.training and bool(m.track_running_stats)


def _constant_norm(m: Any, input: Any) -> Any:
    """Computes what a batch norm does in inference. Its own forward first asks for the number of
    axes, which a tracer does not know."""
    return F.batch_norm(input, m.running_mean, m.running_var, m.weight, m.bias, False, 0.0, m.eps)


@released_source_texts()
def trace(model: nn.Module | ExportedProgram, *example_inputs: Any) -> fx.GraphModule:
    """Returns the graph of `model` by symbolic tracing. With `example_inputs` every node knows its
    shape.

        gm = qfx.trace(model, x)
        int8, plan = qfx.rewrite(gm)

    The result is an `fx.GraphModule` that shares the parameters of `model`. Raises what `torch.fx`
    raises for Python that cannot be traced symbolically; `torch.compile(model, backend="qfx")` has
    no such limit. Source: `torch.fx.Tracer`, `torch.fx.passes.fake_tensor_prop`.
    """
    model = model.module() if isinstance(model, ExportedProgram) else model
    gm = clone(model) if isinstance(model, fx.GraphModule) else _symbolic_trace(model)
    if example_inputs:
        with torch.no_grad():
            propagate_shapes(gm, example_inputs)
    return gm


def _symbolic_trace(model: nn.Module) -> fx.GraphModule:
    tracer = Tracer()
    graph = tracer.trace(model)
    return fx.GraphModule(tracer.root, graph, type(model).__name__)


def clone(gm: fx.GraphModule) -> fx.GraphModule:
    """Returns a copy of `gm` with its own graph and its own bodies of higher-order operators.
    Parameters, other submodules and the values of metadata are shared."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result: Any = graph.graph_copy(gm.graph, copies, return_output_node=True)
    if result is not None:
        value, old_output = result
        graph.output(value).meta = dict(old_output.meta)
    nodes.copy_signature(gm.graph, graph)
    copy = fx.GraphModule(gm, graph, type(gm).__name__)
    for name, child in gm.named_children():
        if isinstance(child, fx.GraphModule) and hasattr(copy, name):
            setattr(copy, name, clone(child))  # the body of a higher-order operator
    copy.meta = dict(gm.meta)
    nodes.copy_annotations(gm, copy, copies)
    return copy


def graphs(gm: fx.GraphModule) -> list[fx.Graph]:
    """Returns the graph of `gm` and the graphs of all bodies (subgraphs) in it."""
    return [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]


def targets(gm: fx.GraphModule) -> Iterator[Any]:
    """Yields the call targets of all nodes of `gm` and of the bodies (subgraphs) in it."""
    return (node.target for graph in graphs(gm) for node in graph.nodes)


def value(node: fx.Node) -> Any:
    """Returns the value that the capture recorded for the node, usually a FakeTensor, or None if it
    is unknown."""
    recorded = node.meta.get("example_value", node.meta.get("val"))
    if recorded is None and node.op == "get_attr":
        return attribute(node)
    return recorded


def device(node: fx.Node) -> torch.device:
    """Returns the device of the node's tensor, or of the first one from which the node is computed;
    the CPU if none is known."""
    while not isinstance(value(node), torch.Tensor) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    recorded = value(node)
    return recorded.device if isinstance(recorded, torch.Tensor) else torch.device("cpu")


def attribute(node: fx.Node) -> Any:
    """Returns the object that a get_attr node refers to, or None if the graph's module lacks it."""
    owner: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        owner = getattr(owner, name, None)
    return owner


def is_constant(node: fx.Node) -> bool:
    """Whether the node is a parameter, a buffer or a tensor attribute of the captured module."""
    recorded = value(node)
    if node.op == "get_attr":
        return isinstance(recorded, torch.Tensor)
    if node.op != "placeholder":
        return False
    if OUTER in node.meta:
        return bool(node.meta[OUTER])
    return nodes.is_static_input(node) or isinstance(recorded, nn.Parameter)


def roots(node: fx.Node) -> list[fx.Node]:
    """Returns the constants of the outermost graph for which a constant of a body (subgraph)
    stands; the node itself if it is not in a body."""
    if not node.meta.get(OUTER):
        return [node]
    return [root for given in node.meta[OUTER] for root in roots(given.operand)]


class Named(NamedTuple):
    """A name relative to a module for which the compiled frame has a name: `layers.0.fc` relative
    to `L['self']`."""

    root: str
    path: str

    def under(self, prefixes: Mapping[str, str]) -> str:
        return f"{prefixes.get(self.root, '')}.{self.path}".strip(".")


class Caller(NamedTuple):
    """The module whose forward called a node: its id, valid while the module lives, and its name in
    the code."""

    id: int | None
    named: Named


def called_by(node: fx.Node) -> Caller | None:
    stack = list((node.meta.get("nn_module_stack") or {}).items())
    if not stack:
        return None
    key, (source, *_) = stack[-1]
    number = str(key).partition("@")[0]  # the part after "@" tells several calls apart
    return Caller(int(number) if number.isdigit() else None, named_by_text(str(source)))


def module_path(node: fx.Node, prefixes: Mapping[str, str] = _NO_PREFIXES) -> str:
    """Returns the dotted path of the module whose forward called the node, or '' outside any
    module."""
    caller = called_by(node)
    named = node.meta.get(NAMED) or (caller.named if caller else None)
    return named.under(prefixes) if named else ""


def parameter_name(node: fx.Node, prefixes: Mapping[str, str] = _NO_PREFIXES) -> str:
    """Returns the dotted name of a parameter or buffer node."""
    if node.op == "get_attr":
        return str(node.target)
    if node.meta.get(OUTER):
        return parameter_name(roots(node)[0], prefixes)
    named = node.meta.get(NAMED) or named_by_source(node)
    return named.under(prefixes) if named else node.name


def named_by_source(node: fx.Node) -> Named | None:
    """Returns the name that Dynamo gives for the source of a graph input, or None outside
    Dynamo."""
    source = nodes.source_text(node)
    if source is None:
        return None
    found = named_by_text(source)
    return found if found.path else Named("", _ROOT.sub(r"\1", found.root))


def named_by_text(source: str) -> Named:
    """Returns the name in `source`, a Python expression by which Dynamo refers to an object.

    `L['self']._modules['a'].b[0]` gives `a.b.0` and `getattr(L['self'].a, '0')` gives `a.0`, both
    below `L['self']`; `L['d']['a']` gives `d.a`.
    """
    root = _ROOT.search(source)
    if root is None:
        return Named("", source)
    rest = source[root.end() :]
    words = [word for dot, word, call in _PART.findall(rest) if dot or not call]
    plain = [str(ast.literal_eval(w)) if w[0] in "'\"" else w for w in words]
    container = (
        [root.group(1)] if rest.startswith("[") else []
    )  # held by a container, not by a module
    shown = [w for w in plain if w not in _BETWEEN and not w.startswith("__")]
    return Named(root.group(), ".".join([*container, *shown]))
