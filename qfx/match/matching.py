"""Matching: finds the matmuls of a graph that may become int8, and a reason for every other node
that contains a matmul.

site: out = activation(x_mk @ w_nk.T + bias_n)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import guard_or_false

from qfx.graph.bodies import link
from qfx.graph.calls import calls
from qfx.graph.capture import is_constant, module_path, parameter_name, roots, value
from qfx.graph.computed import nodes_that_compute, sources_of
from qfx.graph.faults import at
from qfx.graph.views import T, View, apply, constant_behind, then
from qfx.graph.writes import nodes_in_transforms, without_gradients, written_roots
from qfx.host.operators import HigherOrderOperator, OpOverload, OpOverloadPacket
from qfx.host.tensors import is_fake
from qfx.match.base import Match, Unmatched, of_kind
from qfx.match.contractions import Operands, is_weight
from qfx.match.epilogue import trains, with_epilogue
from qfx.match.experts import expert_product
from qfx.match.grouped import GroupedConvolution, grouped_convolution
from qfx.match.operator_calls import own_call
from qfx.match.products import product
from qfx.match.recurrent import PARAMETERS, path_of_cell, recurrent_steps
from qfx.match.refusals import of_operands
from qfx.match.site import Site
from qfx.match.spellings import operands, spelling
from qfx.values.limits import FLOATS, LARGEST_K, short

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


_TRANSFORMED = "inside a torch.func transform, for which the operators have no rules yet"


def match(gm: fx.GraphModule, prefixes: Mapping[str, str] | None = None) -> tuple[Match, ...]:
    """Returns a match for every node that contains a matmul, in `gm` and in the subgraphs of its
    higher-order operators, in order.

    `prefixes`: completes names, as in `qfx.graph.capture.module_path`.
    """
    link(gm)
    found = _matches(gm, prefixes or {})
    sites = (*of_kind(found, Site), *(m.site for m in of_kind(found, GroupedConvolution)))
    weights = [site.weight for site in sites]
    inside = {node for weight in weights for node in nodes_that_compute(weight)}
    return tuple(m for m in found if m.node not in inside)


def _matches(gm: fx.GraphModule, prefixes: Mapping[str, str]) -> tuple[Match, ...]:
    editable = {call.node: call.bodies for call in calls(gm)}
    written = written_roots(gm.graph)
    inside_transform = nodes_in_transforms(gm.graph)
    found: list[Match] = []
    seen: set[int] = set()  # bodies that several calls share
    for node in gm.graph.nodes:
        row = spelling(node)
        if row is not None:
            with at(node):
                operands_or_why = _TRANSFORMED if node in inside_transform else operands(node, row)
                found.append(_matmul(node, operands_or_why, written, prefixes))
        elif node in editable:
            bodies = {id(body): body for body in editable[node]}
            found += [m for i, b in bodies.items() if i not in seen for m in _matches(b, prefixes)]
            seen.update(bodies)
        elif isinstance(node.target, HigherOrderOperator):
            for body in filter(_is_body, map(value, node.all_input_nodes)):
                found += _inside_body(node, body, prefixes)
        elif own := own_call(node, module_path(node, prefixes)):
            found.append(own)
        elif _takes_a_weight_elsewhere(node):
            path = module_path(node, prefixes)
            reason = f"{node.target} takes a weight and is not PyTorch's"
            found.append(Unmatched(node=node, path=path, reason=reason))
        elif node.op == "call_module":
            found += _module_call(gm, node, prefixes)
    return tuple(found)


_RECURRENT: tuple[type[nn.Module], ...] = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
_LEAVES = (*_RECURRENT, nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_LEAVES += (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _module_call(gm: fx.GraphModule, node: fx.Node, prefixes: Mapping[str, str]) -> list[Match]:
    module = gm.get_submodule(str(node.target))
    if isinstance(module, fx.GraphModule):
        return _inside_body(node, module, prefixes)
    if not isinstance(module, _LEAVES):
        return []
    reason = f"{type(module).__name__} is a leaf module of this graph; qfx.trace opens it"
    return [Unmatched(node=node, path=str(node.target), reason=reason)]


def _takes_a_weight_elsewhere(node: fx.Node) -> bool:
    """Whether a node calls another library's operator with a weight, so that it may hold a
    matmul."""
    if not isinstance(node.target, OpOverload | OpOverloadPacket):
        return False
    library = str(node.target).partition(".")[0]
    matrices = [a for a in node.all_input_nodes if is_weight(a) and value(a).ndim >= 2]
    return library not in ("aten", "prims", "qfx") and bool(matrices)


def _is_body(candidate: Any) -> bool:
    return isinstance(candidate, fx.GraphModule)


def _inside_body(node: fx.Node, body: fx.GraphModule, prefixes: Mapping[str, str]) -> list[Match]:
    reason = f"inside the body of {node.target}, whose bodies qfx does not edit"
    return [m.closed(reason) for m in _matches(body, prefixes)]


def _matmul(
    node: fx.Node,
    parsed: Operands | Match | str,
    written: set[fx.Node],
    prefixes: Mapping[str, str],
) -> Match:
    path = module_path(node, prefixes)
    found = _linear(node, parsed, prefixes) if isinstance(parsed, Operands) else parsed
    if isinstance(found, Site) and isinstance(parsed, Operands) and parsed.rows is not None:
        refused = _refusal(found, written, dimensions=3)
        found = refused or expert_product(found, parsed.rows, _shape_nk(found))
    elif isinstance(found, Site) and isinstance(parsed, Operands) and parsed.steps is not None:
        refused = _refusal(found, written)
        found = refused or recurrent_steps(found, parsed.steps, _shape_nk(found))
    elif isinstance(found, Site):
        refused = _refusal(found, written)
        site = found if refused else with_epilogue(_with_shape(found), written)
        groups = parsed.groups if isinstance(parsed, Operands) else 1
        found = refused or (grouped_convolution(site, groups) if groups > 1 else site)
    if isinstance(found, str):
        names = node.meta.get(PARAMETERS, ())
        return Unmatched(node=node, path=path, reason=found, parameters=names)
    of: Any = found if isinstance(found, Site) else getattr(found, "site", None)
    return replace(found, path=path if of is None else path_of_cell(path, of.parameter))


def _linear(node: fx.Node, parsed: Operands, prefixes: Mapping[str, str]) -> Match | str:
    """Returns a `Site` if the right operand is a constant, otherwise a `Product`, or the reason why
    the node is neither."""
    found = constant_behind(parsed.right)
    plain = parsed.w_view == (T,)
    if isinstance(found, str):
        stacked = plain and _is_stack(parsed.right)
        if not stacked and (sources := sources_of(parsed.right)):
            return _of_computed(node, parsed, sources, prefixes)
        return product(node, parsed.x, parsed.right, "", added=parsed.bias) if plain else found
    weight, view = found
    first, *others = (parameter_name(root, prefixes) for root in roots(weight))
    view = then(_cut(node, parsed.right), *view, *parsed.w_view)
    return _site(node, parsed, weight, view, first, tuple(others), prefixes)


def _is_stack(node: fx.Node) -> bool:
    """Whether a value has more than two dimensions, so that it is multiplied matrix by matrix."""
    return getattr(value(node), "ndim", 2) > 2


def _of_computed(
    node: fx.Node,
    parsed: Operands,
    sources: tuple[fx.Node, ...],
    prefixes: Mapping[str, str],
) -> Site:
    """Returns the match of a matmul whose weight the graph computes from constants."""
    first = parameter_name(sources[0], prefixes)
    return _site(node, parsed, parsed.right, parsed.w_view, first, (), prefixes)


def _site(
    node: fx.Node,
    parsed: Operands,
    weight: fx.Node,
    view: View,
    parameter: str,
    others: tuple[str, ...],
    prefixes: Mapping[str, str],
) -> Site:
    return Site(
        node=node,
        x=parsed.x,
        weight=weight,
        view=view,
        bias=parsed.bias,
        bias_view=parsed.bias_view,
        out_dtype=getattr(value(node), "dtype", None),
        path=module_path(node, prefixes),
        parameter=parameter,
        others=others,
        trains=trains(node),
        x_view=parsed.x_view,
        y_view=parsed.y_view,
    )


def _cut(node: fx.Node, right: fx.Node) -> View:
    """Returns a detach step if the weight was viewed under no_grad and thus gets no gradient
    through the view."""
    silent = without_gradients(node.graph)
    while not is_constant(right):
        if right in silent and node not in silent:
            return (("detach", ()),)
        right = right.all_input_nodes[0]
    return ()


def _with_shape(site: Site) -> Site:
    n, k = _shape_nk(site) or (None, None)
    x, y = value(site.x), value(site.node)
    if x is None or (site.x_view and (y is None or not n)):
        return replace(site, m=None, k=k, n=n)
    m = math.prod(y.shape) // n if site.x_view else math.prod(x.shape[:-1])
    return replace(site, m=m, k=k, n=n)


def _shape_nk(site: Site) -> tuple[int, ...] | None:
    """Returns the shape of the weight after its view. A symbolic size is replaced by its number:
    weights do not grow between calls, and PyTorch cannot view meta tensors with symbolic sizes."""
    w = value(site.weight)
    if w is None:
        return None
    sizes = [int(size) for size in w.shape]
    return tuple(apply(site.view, torch.empty(sizes, dtype=w.dtype, device="meta")).shape)


def _refusal(site: Site, written: set[fx.Node], dimensions: int = 2) -> str | None:
    """Returns why a matmul with a constant right operand cannot be int8, or None. `dimensions`: of
    the weight after its view: 3 for the weights of experts."""
    w = value(site.weight)
    if why := of_operands({"input": value(site.x), "weight": w}):
        return why
    if w is not None and type(w) not in _PLAIN_TENSORS and not is_fake(w):
        return f"the weight is a {type(w).__name__}, a tensor subclass"
    shape = _shape_nk(site)
    if shape is not None and len(shape) != dimensions:
        return f"the weight has {len(shape)} dimensions, not {dimensions}"
    if shape is not None and shape[-1] > LARGEST_K:
        return f"K is above {LARGEST_K}, where an int32 accumulator could overflow"
    if written.intersection({site.weight, *sources_of(site.weight)}):
        return "the weight is modified in place inside the graph"
    return _bias_refusal(site, shape)


def _bias_refusal(site: Site, shape: tuple[int, ...] | None) -> str | None:
    if site.bias is None:
        return None
    bias = value(site.bias) if isinstance(site.bias, fx.Node) else None
    if not isinstance(site.bias, fx.Node):
        return "the added term is not a tensor of the graph"
    if bias is None or shape is None:
        return None
    n, each = shape[0], math.prod(times for _, ((times,),) in site.bias_view)
    if bias.ndim != 1 or not guard_or_false(bias.shape[0] * each == n):
        return (
            f"the added term has shape {list(bias.shape)}, not one bias for each of the {n} outputs"
        )
    return None if bias.dtype in FLOATS else f"the bias is {short(bias.dtype)}"
