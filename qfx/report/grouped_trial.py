"""A convolution of groups of channels by itself, to be measured in int8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn

from qfx.match.grouped import GroupedConvolution
from qfx.pipeline import Context, run_passes
from qfx.values.config import Config
from qfx.values.scheme import Scheme


def grouped_form(
    found: GroupedConvolution, scheme: Scheme, values: Mapping[fx.Node, Any]
) -> fx.GraphModule:
    """Returns a graph of the single input x that computes the convolution, without what follows it,
    in int8. `values`: of the nodes that it reads; all but x are constants."""
    graph, holder = fx.Graph(), nn.Module()
    x = graph.placeholder("x")
    x.meta["val"] = values[found.site.x].detach()

    def read(node: fx.Node) -> Any:
        if node is found.site.x:
            return x
        if not isinstance(value := values[node], Tensor):
            return value
        holder.register_buffer(node.name, value.detach())
        constant = graph.get_attr(node.name)
        constant.meta["val"] = value.detach()
        return constant

    node = found.site.node
    args, kwargs = fx.map_arg((node.args, node.kwargs), read)
    made = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
    made.meta["val"] = values[node].detach()
    graph.output(made)
    gm = fx.GraphModule(holder, graph)
    run_passes(gm, Context(Config(scheme=scheme, minimum_gain=0, smoothing=False)))
    return gm
