"""The frame Dynamo is compiling: which modules it holds, so that names are absolute and checkable.

After a graph break Dynamo compiles a submodule's forward as a frame of its own, and the names in
its graph are relative to that submodule. The modules whose methods are running further up the stack
complete them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

import torch
from torch import nn

from qfx.patterns import names
from qfx.site import Match


def _root() -> Any:
    """Dynamo's state of the frame that it is compiling; None outside Dynamo."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # a second to import

    try:
        return InstructionTranslator.current_tx().output.root_tx
    except AttributeError:
        return None


def code() -> CodeType | None:
    """Of the frame that Dynamo is compiling."""
    root = _root()
    return None if root is None else root.f_code


def _frame_modules() -> dict[str, nn.Module]:
    """Source expression -> module, for the modules the compiled frame can name."""
    frame = _root()
    if frame is None:
        return {}
    found = {f"L['{k}']": v for k, v in frame.f_locals.items() if isinstance(v, nn.Module)}
    used = frame.f_code.co_names + frame.f_code.co_freevars
    globals_ = {k: frame.f_globals.get(k) for k in used}
    return found | {f"G['{k}']": v for k, v in globals_.items() if isinstance(v, nn.Module)}


def _running_modules() -> list[nn.Module]:
    """The modules whose methods are on the Python stack, the outermost first; without those that
    only wrap another, which would put their own names before the model's."""
    from torch._dynamo.eval_frame import OptimizedModule
    from torch.nn.parallel import DistributedDataParallel

    wrappers = (OptimizedModule, DistributedDataParallel)
    found: list[nn.Module] = []
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        running = frame.f_code
        owner = frame.f_locals.get(running.co_varnames[0]) if running.co_argcount else None
        if isinstance(owner, nn.Module) and not isinstance(owner, wrappers):
            found.append(owner)
    return found[::-1]


def prefixes() -> dict[str, str]:
    """Source expression of each module of the compiled frame -> its dotted path in the model."""
    running = _running_modules()
    return {source: _path(module, running) for source, module in _frame_modules().items()}


def running_path() -> str:
    """Path of the innermost module whose method is running, in the outermost one."""
    running = _running_modules()
    return _path(running[-1], running) if running else ""


def _path(module: nn.Module, running: list[nn.Module]) -> str:
    for root in running:
        for path, part in root.named_modules():
            if part is module:
                return path
    return ""


def modules() -> list[nn.Module]:
    """The modules that the compiled frame can name, and those whose methods are running."""
    return [*_frame_modules().values(), *_running_modules()]


SELF = "L['self']"  # the module whose method Dynamo captured


def only_for(path: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, but an error where Dynamo lets another layer than `path` use it.

    Layers that are alike share compiled code where a graph break makes each a frame of its own.
    What a recipe says is of one layer. Each weight that comes is looked at once.
    """
    seen: set[tuple[int, ...]] = set()

    @torch._dynamo.disable
    def checked(*arguments: Any) -> Any:
        weights = tuple(id(a) for a in arguments if isinstance(a, nn.Parameter))
        if weights not in seen:
            if (now := running_path()) != path:
                raise RuntimeError(
                    f"recipe: Dynamo runs the code compiled for {path!r} also for {now!r}, whose "
                    "recipe is another; compile the model as one graph (fullgraph=True says what "
                    "breaks it), or without a recipe"
                )
            seen.add(weights)
        return run(*arguments)

    return checked


def known_names(matches: Iterable[Match]) -> set[str]:
    """Every name a pattern may mean: the graph's own, and those of the modules around it."""
    known = {name for m in matches for name in (*names(m), m.name)}
    for module in modules():
        known.update(name for name, _ in module.named_modules() if name)
        known.update(name for name, _ in module.named_parameters(remove_duplicate=False))
    return known
