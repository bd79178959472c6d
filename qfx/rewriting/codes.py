"""Nodes for the operands of int8 matmuls in a canonical graph. `Inputs` emits the nodes that
quantize an activation, which matmuls with the same input share. `nodes_of` turns a scheme and a
recipe into the nodes that a matmul needs besides its input and bias."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from qfx.graph.capture import value
from qfx.graph.views import emit_view
from qfx.graph.writes import writes
from qfx.match.site import Site
from qfx.ops.code import code_of
from qfx.ops.forms import QUANTIZE, ROTATE, OperatorCall, of_scheme, of_weight, ste_code
from qfx.ops.lowering import LoweringStep
from qfx.ops.packing import Constant, Packing
from qfx.plan.plan import Entry
from qfx.rewriting.notation import OF_MODEL
from qfx.values.scheme import QSpec, Scheme

Codes = dict[str, fx.Node]  # q, scale, zero_point; x if it stays float


class PackedNodes(NamedTuple):
    """The nodes in the graph for the fields of `qfx.weights.cache.Packed`."""

    weight: fx.Node
    factor: fx.Node | None = None
    columns: fx.Node | None = None
    error: fx.Node | None = None

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The nodes that exist, in the order of `Packing.parts`."""
        return tuple(node for node in self if node is not None)


ProvideWeight = Callable[[Site, Packing], PackedNodes]
ProvideConstant = Callable[[fx.Graph, Constant, str], fx.Node]


class Provide(NamedTuple):
    """The functions that add packed weights and constants to a graph. `folded` returns a node with
    the value of one that is computed from constants, once if possible. `qfx.rewriting.constants`
    has the variants."""

    weight: ProvideWeight
    constant: ProvideConstant
    folded: Callable[[fx.Node], fx.Node] = lambda node: node


class SiteNodes(NamedTuple):
    """The nodes that an int8 matmul needs besides its input and bias: its packed weight, the factor
    and rotation of K, the static scale and zero point of x, the indices of the columns of K that
    stay float, and the number N of outputs."""

    scheme: Scheme
    packed: PackedNodes
    factor: fx.Node | None
    rotation: int
    scale: fx.Node | None
    zero_point: fx.Node | None
    outliers: fx.Node | None
    n: int | fx.Node

    @property
    def turned(self) -> bool:
        """Whether x and the weight are transformed along K. Equation (R1)."""
        return self.factor is not None or self.rotation != 0

    @property
    def values(self) -> dict[str, Any]:
        """The arguments of the matmul's operators, by name, that are the same at every call."""
        arguments = of_scheme(self.scheme, self.n, self.rotation) | of_weight(self.packed)
        arguments |= {"factor": self.factor, "rotation": self.rotation, "n": self.n}
        arguments |= {"static_scale": self.scale, "static_zero_point": self.zero_point}
        x = self.scheme.x
        if x is not None:
            arguments |= {"code_of_turned": code_of(x)}
            arguments |= {"ste_code": ste_code(self.scheme, self.rotation)}
        return arguments


def nodes_of(entry: Entry, site: Site, provide: Provide) -> SiteNodes:
    scheme, recipe = entry.scheme, entry.recipe
    assert scheme is not None
    rotation, given = scheme.block(site.k), recipe.factor if recipe else None
    columns = recipe.outliers if recipe else ()
    rounding, guarded = recipe.rounding if recipe else None, entry.guard is not None
    packing = Packing(scheme.w, given, rotation, columns, guarded, rounding, scheme.group)
    packed = provide.weight(site, packing)
    device = str(getattr(value(site.weight), "device", "cpu"))

    def constant(what: str, values: Any, dtype: torch.dtype = torch.float32) -> fx.Node | None:
        if values is None:
            return None
        vector = Constant(values if isinstance(values, tuple) else (values,), dtype, device)
        return provide.constant(site.node.graph, vector, f"{site.node.name}_{what}")

    factor = packed.factor or constant("factor", _without(columns, given, site.k))
    scale = constant("static_scale", recipe.scale if recipe else None)
    zero = constant("static_zero", recipe.zero_point if recipe else None, torch.int32)
    outliers = constant("outliers", columns or None, torch.int64)
    return SiteNodes(scheme, packed, factor, rotation, scale, zero, outliers, _rows(site))


def _rows(site: Site) -> int | fx.Node:
    """Returns N: a literal if the capture knew it, else a node that reads the float weight's
    shape."""
    if site.n is not None:
        return site.n
    with site.node.graph.inserting_before(site.node):
        w_nk = emit_view(site.view, site.weight)
        return site.node.graph.call_function(torch.ops.aten.sym_size.int, (w_nk, 0))


def _without(
    columns: tuple[int, ...], factor: tuple[float, ...] | None, k: int | None
) -> tuple[float, ...] | None:
    """Returns `factor` [K] (None means 1) with 0 for these columns, which sets the columns of x to
    zero. Equation (R3)."""
    if not columns:
        return factor
    kept = list(factor or (1.0,) * (k or 0))
    for column in columns:
        kept[column] = 0.0
    return tuple(kept)


def emit(graph: fx.Graph, target: Callable[..., Any], args: tuple[Any, ...], name: str) -> fx.Node:
    """Emits a function call at the graph's insertion point, with a readable name."""
    return graph.create_node("call_function", target, args, name=name)


def inherit(node: fx.Node, source: fx.Node) -> None:
    """Copies the metadata about the origin of `source` to `node`."""
    for key in ("nn_module_stack", "stack_trace", "source_fn_stack", OF_MODEL):
        if key in source.meta:
            node.meta[key] = source.meta[key]


def emit_call(graph: fx.Graph, call: OperatorCall, values: Mapping[str, Any], name: str) -> fx.Node:
    """Emits a call of an operator whose arguments are given by name."""
    return emit(graph, call.operator, call.arguments(values), name)


def emit_step(graph: fx.Graph, step: LoweringStep, values: Mapping[str, Any], stem: str) -> Codes:
    """Emits the operator call of a step and returns the nodes of its results, by name."""
    node = emit_call(graph, step.call, step.read(values), f"{stem}_{step.stem}")
    if len(step.gives) == 1:
        return {step.gives[0]: node}
    return _parts(graph, node, step.gives, stem)


def _parts(graph: fx.Graph, node: fx.Node, names: Sequence[str], stem: str) -> Codes:
    return {
        name: emit(graph, operator.getitem, (node, i), f"{stem}_{name}")
        for i, name in enumerate(names)
    }


def quantized(
    graph: fx.Graph,
    values: Mapping[str, Any],
    spec: QSpec,
    stem: str,
    parts: Sequence[str] = ("q", "scale", "zero_point"),
) -> Codes:
    """Emits quantize(x) and returns the nodes of its results, by the names `parts`. `values`:
    arguments by name, which contain x."""
    triple = emit_call(graph, QUANTIZE, {**values, "code": code_of(spec)}, f"{stem}_quantize")
    return _parts(graph, triple, parts, stem)


def random_seed(graph: fx.Graph, device: torch.device) -> fx.Node:
    """Emits the seed of an int8 backward, drawn at each call from PyTorch's random numbers."""
    return graph.call_function(torch.randint, (0, 2**62, (1,)), {"device": device})


class Inputs:
    """The quantized inputs of the matmuls of a graph. Matmuls that quantize the same x in the same
    way share the nodes, unless x may change between them."""

    def __init__(self, graph: fx.Graph, replaced: dict[fx.Node, fx.Node]) -> None:
        self.graph = graph
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.write_positions = [i for n, i in self.position.items() if writes(n)]
        self.replaced = dict(replaced)  # the former output of a site -> its int8 form
        self.made: dict[Any, tuple[int, Codes]] = {}

    def up_to_date(self, site: Site) -> Site:
        """Returns the match with x and bias replaced by their int8 forms, if they are results of
        matmuls that were rewritten."""
        bias = None if site.bias is None else self.replaced.get(site.bias, site.bias)
        return replace(site, x=self.replaced.get(site.x, site.x), bias=bias)

    def of(self, site: Site, values: Mapping[str, Any], steps: Sequence[LoweringStep]) -> Codes:
        """Returns the nodes of the results of these steps for the input x [..., K] of the matmul,
        with the value that x has at the matmul; the node of x itself if there are no steps."""
        if not steps:
            with self.graph.inserting_before(site.node):
                return {"x": emitted_input(site)}
        *before, step = steps

        def make() -> Codes:
            x = self.of(site, values, before)["x"]
            if step.call is ROTATE:  # in float32 (R1)
                x = emit_view((("to", (torch.float32,)),), x)
            return emit_step(self.graph, step, {**values, "x": x}, site.x.name)

        return self._once(site, tuple(_what(each, values) for each in steps), make)

    def _once(self, site: Site, what: Any, make: Callable[[], Codes]) -> Codes:
        here = self.position[site.node]
        key = (site.x, site.x_view, what)
        if key in self.made:
            position, nodes = self.made[key]
            if not any(position < i < here for i in self.write_positions):
                return nodes
        with self.graph.inserting_before(site.node):
            nodes = make()
            first = next(iter(nodes.values()))
            for made in (first, first.all_input_nodes[0]):
                inherit(made, site.node)
        self.made[key] = (here, nodes)
        return nodes


def _what(step: LoweringStep, values: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns a hashable description of what a step does to x."""
    arguments = step.call.arguments({**step.read(values), "x": None})
    return (step.call, *(tuple(a) if isinstance(a, list) else a for a in arguments))


def emitted_input(site: Site) -> fx.Node:
    """Emits, at the graph's insertion point, the matrix [..., K] that the matmul multiplies, and
    returns its node."""
    gradients = site.trains or _records(site.x)
    x = site.node.graph.call_function(torch.detach, (site.x,)) if gradients else site.x
    return emit_view(site.x_view, x)


def _records(x: fx.Node) -> bool:
    """Whether a gradient may flow to x; it does not flow through the codes of x."""
    return bool(getattr(value(x), "requires_grad", True))
