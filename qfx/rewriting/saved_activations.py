"""Activations that a compiled forward graph saves for its backward graph, in 8 bits.

forward:  saves x     ->  saves q, scale = quantize(x, seed), of rows as x has them in memory
backward: reads x     ->  reads q * scale, which the compiler fuses into what reads it

Tensors of bool, such as masks of dropout, are saved as one bit for each element, without a loss.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from math import prod

from torch import fx

from qfx.graph.capture import value
from qfx.host.shapes import hint
from qfx.rewriting.saved_forms import BITS, CallEmitter, SavedForm, form_of
from qfx.rewriting.smooth_uses import SmoothUses, is_statistic, sources

log = logging.getLogger(__name__)


def compress(
    saved: Sequence[tuple[fx.Node, fx.Node]],
    results: Sequence[fx.Node],
    gradients: Sequence[fx.Node],
) -> dict[fx.Node, list[fx.Node]]:
    """Rewrites the graphs of aten operators, with recorded values, into which a training step was
    divided. `saved`: tensors of the forward graph that are saved, each with the input of the
    backward graph that reads it. `results`: of the forward graph, which exist anyway, as its inputs
    do. `gradients`: inputs of the backward graph. Returns what is saved in the place of each
    tensor, which the caller puts there."""
    visible = {each for node in results for each in sources(node)}
    packed: dict[fx.Node, list[fx.Node]] = {}
    smooth = SmoothUses(gradients)
    for node, read in saved:
        form = None if _exists_anyway(node, visible) else form_of(value(node))
        if form is not None and (form is BITS or _bears_noise(node, read, smooth)):
            packed[node] = form.pack(
                CallEmitter(node.graph.output_node(), f"{node.name}_saved"), node
            )
            _read_packed(read, packed[node], form)
    if packed:
        parts = [part for each in packed.values() for part in each]
        log.info(
            "%d of %d tensors saved for the backward pass are coded: %.1f MB instead of %.1f",
            *(len(packed), len(saved), _megabytes(parts), _megabytes(packed)),
        )
    return packed


def _exists_anyway(node: fx.Node, visible: set[fx.Node]) -> bool:
    """Whether a tensor is an input of the graph or a result, or a view of one."""
    return any(each.op == "placeholder" or each in visible for each in sources(node))


def _bears_noise(node: fx.Node, read: fx.Node, smooth: SmoothUses) -> bool:
    return not is_statistic(node) and smooth.are_all_of(read)


def _read_packed(read: fx.Node, packed: Sequence[fx.Node], form: SavedForm) -> None:
    """Replaces an input of the backward graph by inputs that are what was saved."""
    graph, inputs = read.graph, []
    for part in packed:
        with graph.inserting_before(read):
            inputs.append(graph.create_node("placeholder", part.name, name=part.name))
        inputs[-1].meta["val"] = value(part)
    users = [*read.users]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    y = form.unpack(CallEmitter(first, f"{read.name}_read"), inputs, value(read))
    for user in users:
        user.replace_input_with(read, y)
    graph.erase_node(read)


def _megabytes(nodes: Iterable[fx.Node]) -> float:
    tensors = map(value, nodes)
    return sum(prod(map(hint, t.shape)) * t.itemsize for t in tensors) / 1e6  # type: ignore[arg-type]
