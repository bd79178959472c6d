"""Recompilation: constants of a model that change between calls become operands that the graph
packs itself at every call.

Weights that FSDP gathers for each call are known when a graph is captured. Buffers that are
rewritten between calls, such as a cache of keys, are noticed as the graph runs: its wrapper reports
them, and the frame's next call compiles again.
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
    """Stores at the inputs of a captured graph why they are packed at every call."""
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
    """Clears the recorded inputs when `torch._dynamo.reset()` is called."""
    _REWRITTEN.clear()
