"""Fusion: turns a canonical graph into the fewest operators with the same bits, by the `RULES`.

    found in the graph  ->  replacement, unless a condition refuses it

The rules are tried in order on every node, and the first that applies is used. If a rule fits and
is refused, the plan says why. Then linears with the same input become one call
(`qfx.rewriting.shared_inputs`), and so does a whole block of experts, which has bits of its own
(`qfx.rewriting.fuse_experts`). On a GPU Inductor fuses the code between operators: there a
quantization without a rotation becomes the aten operators of `qfx.rewriting.aten_quantization`, and
`linear` reads its codes (docs/decisions/0013-quantization-on-cuda-is-aten.md).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from qfx.graph.capture import device, graphs
from qfx.graph.faults import at
from qfx.graph.patterns import Bound, Pattern, Template, calls
from qfx.graph.writes import changed_between
from qfx.host.nodes import is_erased
from qfx.ops.code import Code
from qfx.ops.forms import DYNAMIC, LINEAR
from qfx.rewriting.aten_quantization import inline, inlined
from qfx.rewriting.canonical import finish
from qfx.rewriting.codes import emit
from qfx.rewriting.erasing import erase
from qfx.rewriting.fuse_experts import fuse_experts
from qfx.rewriting.notation import OF_MODEL, Notes, pattern, template
from qfx.rewriting.shared_inputs import runs_several, share_inputs
from qfx.values.scheme import PER_ROW, PER_TENSOR

Refusal = Callable[[fx.Node, Bound], str | None]


def _nothing(bound: Bound) -> Bound:
    return {}


@dataclass(frozen=True)
class Rule:
    """One replacement. `unless`: conditions under which it does not apply, each returning a reason
    or None. In a pattern, `acc` is the node where the new operator is inserted, and `y` the result
    of the matmul if that is not the root. `also`: names of the template that are derived from those
    of the pattern."""

    find: Pattern
    make: Template
    unless: tuple[Refusal, ...] = ()
    also: Callable[[Bound], Bound] = _nothing

    def why_not(self, root: fx.Node, bound: Bound) -> str | None:
        return next(filter(None, (refuses(root, bound) for refuses in self.unless)), None)


def fuse(gm: fx.GraphModule) -> Notes:
    """Changes a canonical graph in place to its fused form, and returns notes for the plan: which
    rules fitted a matmul but were refused, and why."""
    notes: Notes = defaultdict(list)
    for graph in graphs(gm):
        for rules in RULES:
            for node in list(graph.nodes):
                if not is_erased(node):
                    with at(node):
                        _first(graph, node, rules, notes)
        share_inputs(graph, notes)
        fuse_experts(graph, notes)
        for node in list(graph.nodes):
            if not is_erased(node) and calls(node, torch.ops.qfx.quantize.default):
                with at(node):
                    inline(graph, node)
    finish(gm, graphs(gm))
    return notes


def _first(graph: fx.Graph, node: fx.Node, rules: tuple[Rule, ...], notes: Notes) -> None:
    """Applies the first rule that fits the node and is not refused."""
    for rule in rules:
        bound = rule.find.match(node) if rule.find.starts_at(node) else ""
        if isinstance(bound, str):
            continue
        if why_not := rule.why_not(node, bound):
            place = bound.get("y", node).meta.get(OF_MODEL)
            if place is not None:
                notes[place].append(f"no {rule.make.name}: {why_not}")
            continue
        _apply(graph, node, rule.make, bound | rule.also(bound))
        return


def _apply(graph: fx.Graph, root: fx.Node, make: Template, bound: Bound) -> None:
    arguments = make.arguments(bound)
    if root.target is make.target:
        former, root.args, root.kwargs = root.all_input_nodes, arguments, {}
        for node in former:
            erase(graph, node, down_to=set())
        return
    y = bound.get("y", root)
    with graph.inserting_before(bound.get("acc", root)):
        made = emit(graph, make.target, arguments, f"{y.name.removesuffix('_dequantize')}_int8")
    made.meta = dict(root.meta)
    if OF_MODEL in y.meta:
        made.meta[OF_MODEL] = y.meta[OF_MODEL]
    root.replace_all_uses_with(made)
    erase(graph, root, down_to=set())


# --- conditions ---


def _products_are_read(root: fx.Node, bound: Bound) -> str | None:
    return None if len(bound["acc"].users) == 1 else "its int32 products are read again"


def _floats_are_read(root: fx.Node, bound: Bound) -> str | None:
    """Refuses if a node other than the quantization at `root` reads the floats, directly or
    detached."""
    node: Any = root.args[0]
    while len(node.users) == 1 and node is not bound["y"]:
        node = node.args[0]
    return None if len(node.users) == 1 else "its result is read in float too"


def _is_cast(root: fx.Node, bound: Bound) -> str | None:
    dtype = bound["out_dtype"]
    return None if dtype == torch.float32 else f"its result is {dtype}, which codes are made of"


def _is_turned(root: fx.Node, bound: Bound) -> str | None:
    turned = bound["factor"] is not None or Code(*bound["out_code"]).rotation
    return "what reads its codes transforms them" if turned else None


def _codes_are_shared(root: fx.Node, bound: Bound) -> str | None:
    """Refuses if several matmuls read the codes, unless these are linears with the same
    quantization, which may become one call later."""
    readers = bound.get("acc", root).args[0].users
    together = runs_several(bound["t"], bound["weight"])
    if len(readers) == 1 or (together and all(calls(r, *_LINEARS) for r in readers)):
        return None
    return f"{len(readers)} matmuls read its codes"


def _floats_change(root: fx.Node, bound: Bound) -> str | None:
    """Refuses if the floats may change before the matmul would quantize them itself."""
    read = [node for node in (bound["x"], bound["factor"]) if node is not None]
    writer = changed_between(bound["t"], bound.get("acc", root), read)
    return f"{writer} may write to what its codes are of" if writer else None


def _image_changes(root: fx.Node, bound: Bound) -> str | None:
    """Refuses if the image may change before the convolution would read it."""
    writer = changed_between(bound["rows"], root, [bound["x"]])
    return f"{writer} may write to what its windows are of" if writer else None


def _has_no_kernel(root: fx.Node, bound: Bound) -> str | None:
    return DYNAMIC.lacking(device(bound["t"]))


def _is_inlined(root: fx.Node, bound: Bound) -> str | None:
    return "Inductor makes its codes" if inlined(bound["t"]) else None


def _factors_are_shared(root: fx.Node, bound: Bound) -> str | None:
    parts = (bound["acc"].args[0], bound["acc"].args[2])
    return None if all(len(n.users) == 1 for n in parts) else "another matmul reads its codes"


# --- rules ---

_LINEAR = "dequantize(acc, t[1], None, weight_scale(weight, n), bias, activation, out_dtype)"
_MM = "int8_mm(t[0], t[2], weight, n)"
_QUANTIZE = "quantize(x, code, None, None, None, factor)"  # with scales that are computed from x
_OF_TURNED = "quantize(turned, [bits, symmetric, per_tensor, group, 0], scale, zero_point, seed)"
_TURNING = template(
    "quantize(x, [bits, symmetric, per_tensor, group, rotation], scale, zero_point, seed, factor)"
)
_LINEARS = (torch.ops.qfx.int8_mm.default, LINEAR.operator)
_DYNAMIC = (_is_inlined, _has_no_kernel, _codes_are_shared, _floats_change)


def _axes(bound: Bound) -> Bound:
    """Returns the arguments of int8_bmm_dynamic that correspond to `per_tensor` and `symmetric`."""
    axes = PER_TENSOR if bound["per_tensor"] else PER_ROW
    return {"axes": list(axes), "is_symmetric": bool(bound["symmetric"])}


RULES: tuple[tuple[Rule, ...], ...] = (
    (  # the transform of K moves into the pass that quantizes
        Rule(pattern(_OF_TURNED, turned="rotate(to(x, dtype), factor, rotation, False)"), _TURNING),
        Rule(pattern(_OF_TURNED, turned="rotate(x, factor, rotation, False)"), _TURNING),
    ),
    (  # only a static quantization reads the floats of a linear
        Rule(
            pattern(
                "quantize(y, out_code, out_scale, out_zero, None, factor)",
                through=(torch.detach,), y=_LINEAR, acc=_MM, t="codes(*how)", out_scale="node",
            ),
            template(
                "linear_requantize(t[0], t[1], t[2], weight, [n, 8, 0, 0, 0], bias, activation, "
                "out_scale, out_zero, out_code)"
            ),
            (_products_are_read, _floats_are_read, _is_cast, _is_turned),
        ),
    ),
    (
        Rule(  # one matmul reads the codes, or several linears that can quantize x themselves
            pattern(_LINEAR, acc=_MM, t=_QUANTIZE),
            template(
                "linear_dynamic(x, weight, [n, 8, 0, 0, 0], bias, code, activation, out_dtype, "
                "factor)"
            ),
            (_products_are_read, *_DYNAMIC),
        ),
        Rule(
            pattern(
                "linear(t[0], t[1], t[2], weight, layout, bias, activation, out_dtype)",
                t=_QUANTIZE,
            ),
            template(
                "linear_dynamic(x, weight, layout, bias, code, activation, out_dtype, factor)"
            ),
            _DYNAMIC,
        ),
        Rule(  # several matmuls read the codes, or the scale is static
            pattern(_LINEAR, acc=_MM, t="codes(*how)"),
            template(
                "linear(t[0], t[1], t[2], weight, [n, 8, 0, 0, 0], bias, activation, out_dtype)"
            ),
            (_products_are_read,),
        ),
        Rule(  # two activations
            pattern(
                "dequantize(acc, a[1], None, columns, None, activation, out_dtype)",
                acc="int8_bmm(a[0], a[2], b[0])",
                a="quantize(left, [bits, symmetric, per_tensor, 0, 0])",
                b="quantize(right, [b_bits, 1, 0, 0, 0])",
            ),
            template("int8_bmm_dynamic(left, right, axes, bits, is_symmetric, b_bits, out_dtype)"),
            (_products_are_read, _factors_are_shared),
            _axes,
        ),
    ),
    (
        Rule(  # windows are quantized where they are read
            pattern(
                "linear_dynamic(rows, weight, layout, bias, code, activation, out_dtype, factor)",
                rows="im2col(x, kernel, stride, padding, dilation)",
            ),
            template(
                "conv_dynamic(x, weight, layout, bias, kernel, stride, padding, dilation, code, "
                "activation, out_dtype, factor)"
            ),
            (_image_changes,),
        ),
    ),
)  # fmt: skip
