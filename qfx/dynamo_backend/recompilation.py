"""Recompilation: weights whose values change between calls are packed inside the graph at every
call, instead of being packed once and cached.

Weights that FSDP gathers for each call are recognized when a graph is captured. Buffers that are
rewritten between calls, such as a cache of keys, are noticed as the graph runs: the wrapper of the
compiled graph reports them, and the next call of the same Python function compiles again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import CodeType
from weakref import WeakKeyDictionary

from torch import fx

from qfx.graph.capture import REPACKED
from qfx.host.distributed import gathered_weights
from qfx.host.dynamo import discard_compiled
from qfx.host.frame import Surroundings
from qfx.host.nodes import source_text

_REWRITTEN: WeakKeyDictionary[CodeType, set[str]] = WeakKeyDictionary()  # frame -> Dynamo's names


def mark_repacked(gm: fx.GraphModule, here: Surroundings) -> None:
    """Marks the inputs of a captured graph that are weights to be packed at every call, with the
    reason."""
    gathered = gathered_weights(here.modules)
    rewritten = _REWRITTEN.get(here.code, set()) if here.code else set()
    for node in gm.graph.nodes:
        if node.op == "placeholder" and gathered(node):
            node.meta[REPACKED] = "FSDP gathers it anew for each call"
        elif node.op == "placeholder" and source_text(node) in rewritten:
            node.meta[REPACKED] = "it was rewritten before each of the last calls"


def reporter(gm: fx.GraphModule, code: CodeType | None) -> Callable[[Iterable[int]], None] | None:
    """Returns the function to which the wrapper of a captured graph reports the positions of inputs
    that were rewritten. Returns None outside Dynamo, because only Dynamo can compile again."""
    if code is None:
        return None
    names = [source_text(node) for node in gm.graph.nodes if node.op == "placeholder"]

    def report(positions: Iterable[int]) -> None:
        new = {name for i in positions if (name := names[i])}
        if not new <= _REWRITTEN.setdefault(code, set()):
            _REWRITTEN[code] |= new
            discard_compiled(code)

    return report


def forget() -> None:
    """Clears the record of rewritten inputs, for `torch._dynamo.reset()`."""
    _REWRITTEN.clear()
