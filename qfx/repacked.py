"""Operands that a graph packs itself, at every call, although they are constants of the model: what
FSDP gathers for each call, and buffers that are rewritten between calls, as a cache of keys is.

The first are known when a graph is captured; the second show as it runs: the wrapper of the graph
reports them, and the frame's next call compiles anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import CodeType
from weakref import WeakKeyDictionary

from torch import fx

from qfx import frame
from qfx.capture import REPACKED, source_of
from qfx.sharding import gathered_weights

_REWRITTEN: WeakKeyDictionary[CodeType, set[str]] = WeakKeyDictionary()  # frame -> Dynamo's names


def mark_repacked(gm: fx.GraphModule) -> None:
    """Notes at the inputs of the graph that is being compiled why they are packed at every call."""
    gathered, code = gathered_weights(), frame.code()
    rewritten = _REWRITTEN.get(code, set()) if code else set()
    for node in gm.graph.nodes:
        if node.op == "placeholder" and gathered(node):
            node.meta[REPACKED] = "FSDP gathers it anew for each call"
        elif node.op == "placeholder" and source_of(node) in rewritten:
            node.meta[REPACKED] = "it was rewritten before each of the last calls"


def reporter(gm: fx.GraphModule) -> Callable[[Iterable[int]], None] | None:
    """For the wrapper of the graph that is being compiled: takes the positions of the inputs that
    were rewritten. None outside Dynamo, which alone can compile anew."""
    code = frame.code()
    if code is None:
        return None
    known: CodeType = code
    names = [source_of(node) for node in gm.graph.nodes if node.op == "placeholder"]

    def report(positions: Iterable[int]) -> None:
        new = {name for i in positions if (name := names[i])}
        if not new <= _REWRITTEN.setdefault(known, set()):
            from torch._dynamo.eval_frame import reset_code  # a second to import

            _REWRITTEN[known] |= new
            reset_code(known)

    return report


def forget() -> None:
    """What `torch._dynamo.reset()` asks of a backend."""
    _REWRITTEN.clear()
