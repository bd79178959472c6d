"""The frame Dynamo is compiling: which modules it holds, so that names are absolute and checkable.

After a graph break Dynamo compiles a submodule's forward as a frame of its own, and the names in
its graph are relative to that submodule. Modules seen as roots earlier complete them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn
from torch._dynamo.symbolic_convert import InstructionTranslator

from qfx.match import Match
from qfx.plan import names

_ROOTS: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _frame_modules() -> dict[str, nn.Module]:
    """Source expression -> module, for the modules the compiled frame can name."""
    try:
        frame = InstructionTranslator.current_tx().output.root_tx
    except AttributeError:  # called outside Dynamo
        return {}
    found = {f"L['{k}']": v for k, v in frame.f_locals.items() if isinstance(v, nn.Module)}
    used = frame.f_code.co_names + frame.f_code.co_freevars
    globals_ = {k: frame.f_globals.get(k) for k in used}
    found |= {f"G['{k}']": v for k, v in globals_.items() if isinstance(v, nn.Module)}
    return found


def prefixes() -> dict[str, str]:
    """Source expression of each module of the frame -> its dotted path below a root seen before."""
    result = {}
    for source, module in _frame_modules().items():
        path = _path_below_roots(module)
        if path is None:
            _ROOTS.add(module)
        result[source] = path or ""
    return result


def _path_below_roots(module: nn.Module) -> str | None:
    for root in _ROOTS:
        for path, part in root.named_modules():
            if part is module and path:
                return path
    return None


def known_names(matches: Iterable[Match]) -> set[str]:
    """Every name a pattern may mean: the graph's own, and those of the modules around it."""
    known = {name for m in matches for name in names(m)}
    for module in [*_frame_modules().values(), *_ROOTS]:
        known.update(name for name, _ in module.named_modules() if name)
        known.update(name for name, _ in module.named_parameters())
    return known
