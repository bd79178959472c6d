"""Verification of every canonical and fused graph, in the notation of the rules.

Tests check all graphs; a user's graphs are checked under TORCH_LOGS="+qfx". A graph that fails
shows a defect of a pass: it stays float, as after any other defect.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from qfx.graph.capture import graphs, is_constant
from qfx.graph.faults import at
from qfx.graph.patterns import Pattern, calls
from qfx.graph.writes import written_inputs
from qfx.host.operators import schema
from qfx.rewriting.notation import INLINED, pattern

log = logging.getLogger(__name__)
ops = torch.ops.qfx

_T = "codes(*how)"
READS_PRODUCTS = (  # the dequantizations of int32 products
    pattern(
        "dequantize(acc, t[1], None, weight_scale(weight, n), bias, activation, out_dtype)",
        acc="int8_mm(t[0], t[2], weight, n)", t=_T,
    ),
    pattern(
        "dequantize(acc, a[1], None, transposed(b[1]), None, activation, out_dtype)",
        acc="int8_bmm(a[0], a[2], b[0])", a=_T, b="quantize(right, code)",
    ),
)  # fmt: skip
READS_CODES = (  # operators that take codes, their scale and their zero point
    pattern("linear(t[0], t[1], t[2], *rest)", t=_T),
    pattern("linear_requantize(t[0], t[1], t[2], *rest)", t=_T),
    pattern("linear_ste(x, w, bias, x_step, w_step, [t[0], t[1], t[2]], *rest)", t=_T),
    pattern("linear_experts_ste(x, w, [t[0], t[1], t[2]], *rest)", t=_T),
)
PRODUCTS = (ops.int8_mm.default, ops.int8_bmm.default)


def checking() -> bool:
    return log.isEnabledFor(logging.DEBUG)


def verify(gm: fx.GraphModule, before: frozenset[fx.Node]) -> None:
    """Raises AssertionError if the passes of qfx have added a node that they must not produce. The
    error names the node.

    `before`: the nodes that existed before the passes. Only new nodes are checked, because calls of
    qfx's operators among the others belong to the model.
    """
    for graph in graphs(gm):
        for node in graph.nodes:
            if node not in before:
                with at(node):
                    faults = list(_faults(node))
                    assert not faults, "; ".join(faults)


def _faults(node: fx.Node) -> Iterator[str]:
    if node.op != "call_function":
        return
    yield from _wrong_call(node)
    yield from _written(node)
    if calls(node, *PRODUCTS):
        yield from _unread(node)
    yield from _no_pattern(node, READS_PRODUCTS, if_reads=PRODUCTS)
    yield from _no_pattern(node, READS_CODES)


def _wrong_call(node: fx.Node) -> Iterator[str]:
    """Yields an error unless a call of an operator of qfx has the arguments of its schema, with
    None only if the schema allows it."""
    if getattr(node.target, "namespace", "") != "qfx":
        return
    wanted = schema(node.target).arguments
    least = sum(not argument.has_default_value() for argument in wanted)
    if node.kwargs or not least <= len(node.args) <= len(wanted):
        yield f"{node.target} has {len(node.args)} arguments, and {len(node.kwargs)} by name"
    for argument, value in zip(wanted, node.args, strict=False):
        if value is None and not str(argument.type).startswith("Optional"):
            yield f"{node.target} has no {argument.name}"


def _written(node: fx.Node) -> Iterator[str]:
    """Yields an error if a node that a pass added writes to a tensor."""
    for source in written_inputs(node):
        yield f"it writes {source}, {'a constant' if is_constant(source) else 'a tensor'}"


def _unread(product: fx.Node) -> Iterator[str]:
    """Yields an error if the int32 result of an int8 matmul is read by anything but a
    dequantization, or by nothing."""
    for reader in product.users:
        if not calls(reader, ops.dequantize.default):
            yield f"its int32 products are read by {reader}"
    if not product.users:
        yield "nothing reads its int32 products"


def _reads_inlined(node: fx.Node) -> bool:
    """Whether a node reads codes that aten operators compute, on a GPU: all three parts of one
    quantization."""
    parts = [n.meta[INLINED] for n in node.all_input_nodes if INLINED in n.meta]
    return len(parts) == 3 and parts == [(parts[0][0], i) for i in range(3)]


def _no_pattern(
    node: fx.Node, patterns: Sequence[Pattern], if_reads: Sequence[object] = ()
) -> Iterator[str]:
    """Yields an error if a node begins like some of the patterns and fits none of them."""
    tried = [each for each in patterns if each.starts_at(node)]
    if not tried or (if_reads and not calls(node.args[0], *if_reads)):
        return
    found = [each.match(node) for each in tried]
    if all(isinstance(each, str) for each in found) and not _reads_inlined(node):
        yield f"it is no {tried[0].text}: {' or '.join(map(str, found))}"
