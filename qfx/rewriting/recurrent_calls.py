"""Recurrent calls: the operator that replaces the steps of a recurrent layer, lstm or gru. It
quantizes the state itself, in canonical graphs too."""

from __future__ import annotations

from typing import Any

from torch import fx

from qfx.graph.views import emit_view
from qfx.match.recurrent import RecurrentSteps
from qfx.ops.forms import GRU, LSTM, of_scheme
from qfx.ops.packing import Packing
from qfx.rewriting.codes import Provide, emit_call, inherit
from qfx.values.scheme import Scheme


def run_steps(found: RecurrentSteps, scheme: Scheme, provide: Provide) -> fx.Node:
    """Replaces the steps of a recurrent layer by their int8 form and returns its node, a tuple."""
    node, site, given = found.node, found.site, found.arguments
    packed = provide.weight(site, packing_of_steps(scheme, found.k)).weight
    values: dict[str, Any] = {**given, "weight": packed, "out_dtype": site.float_type}
    values |= {"bias": site.bias, **of_scheme(scheme, found.n, scheme.block(found.k))}
    with node.graph.inserting_before(node):
        values["h"] = emit_view(site.x_view, values["h"])
        y = emit_call(node.graph, LSTM if "c" in given else GRU, values, f"{node.name}_int8")
    inherit(y, node)
    y.meta = dict(node.meta)
    node.replace_all_uses_with(y)
    node.graph.erase_node(node)
    return y


def packing_of_steps(scheme: Scheme, k: int | None) -> Packing:
    """Returns how a recurrent weight is stored."""
    return Packing(scheme.w, rotation=scheme.block(k), group=scheme.group)
