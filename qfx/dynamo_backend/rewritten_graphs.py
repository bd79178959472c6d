"""Rewritten: a captured graph in int8, run node by node; nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx

from qfx.graph.capture import clone
from qfx.pipeline import Context, run_passes
from qfx.rewriting.constants import NewInputs, as_placeholders
from qfx.rewriting.inputs import drop_unused_inputs
from qfx.weights.feed import with_packed_weights


def rewritten(gm: fx.GraphModule, context: Context) -> Callable[..., Any]:
    """A function of the arguments of `gm`: a copy of it that went through the passes, and is fed
    with packed weights. Raises what `run_passes` does."""
    copy, added = clone(gm), NewInputs()
    run_passes(copy, replace(context, provide=partial(as_placeholders, added=added)))
    if not added:
        return copy.forward
    feed = drop_unused_inputs(copy, added)  # before `forward` is read: it recompiles
    return with_packed_weights(copy.forward, feed)
