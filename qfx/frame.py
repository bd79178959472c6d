"""The frame Dynamo is compiling: which modules it holds, and which are running around it.

After a graph break Dynamo compiles a submodule's forward as a frame of its own, and the names in
its graph are relative to that submodule. The modules whose methods are running further up the stack
complete them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from torch import nn

from qfx.recipe import Recipe


def translated() -> Any:
    """Dynamo's translator of the frame it compiles; None outside Dynamo."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # a second to import

    try:
        return InstructionTranslator.current_tx().output.root_tx
    except AttributeError:
        return None


def code() -> CodeType | None:
    """Of the frame that Dynamo is compiling."""
    frame = translated()
    return None if frame is None else frame.f_code


def _modules_in(scope: str, variables: Mapping[str, Any]) -> dict[str, nn.Module]:
    return {f"{scope}['{k}']": v for k, v in variables.items() if isinstance(v, nn.Module)}


def frame_modules() -> dict[str, nn.Module]:
    """Source expression -> module, for the modules the compiled frame can name."""
    frame = translated()
    if frame is None:
        return {}
    used = frame.f_code.co_names + frame.f_code.co_freevars
    globals_ = {k: frame.f_globals.get(k) for k in used}
    return _modules_in("L", frame.f_locals) | _modules_in("G", globals_)


def _stack() -> Iterator[FrameType]:
    """The running frames, the innermost first."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        yield frame


def running_modules() -> list[nn.Module]:
    """The modules whose methods are on the Python stack, the outermost first; without those that
    only wrap another, which would put their own names before the model's."""
    from torch._dynamo.eval_frame import OptimizedModule
    from torch.nn.parallel import DistributedDataParallel

    wrappers = (OptimizedModule, DistributedDataParallel)
    found: list[nn.Module] = []
    for frame in _stack():
        running = frame.f_code
        owner = frame.f_locals.get(running.co_varnames[0]) if running.co_argcount else None
        if isinstance(owner, nn.Module) and not isinstance(owner, wrappers):
            found.append(owner)
    return found[::-1]


def modules() -> list[nn.Module]:
    """The modules that the compiled frame can name, and those whose methods are running."""
    return [*frame_modules().values(), *running_modules()]


def roots(recipe: Recipe | None = None) -> list[nn.Module]:
    """The running modules, from the one that names are relative to: the outermost, or that which
    has most of the recipe's names, for a calibrated model may run inside another."""
    running = running_modules()
    if recipe is None or not running:
        return running
    wanted = {site.name for site in recipe.sites}
    known = [len(wanted & {name for name, _ in module.named_modules()}) for module in running]
    return running[known.index(max(known)) :]


def place(module: nn.Module, around: Sequence[nn.Module]) -> tuple[nn.Module, str]:
    """The first of the modules that holds this one, and its path there; else itself."""
    for root in around:
        for path, part in root.named_modules():
            if part is module:
                return root, path
    return module, ""


def prefixes(recipe: Recipe | None = None) -> dict[str, str]:
    """Source expression of each module of the compiled frame -> its dotted path in the model."""
    around = roots(recipe)
    return {source: place(module, around)[1] for source, module in frame_modules().items()}


@dataclass(frozen=True)
class Frame:
    """A captured frame: its code and the prefixes it had. Dynamo may run it for other modules.

    It holds no module itself, for what Dynamo compiled lives longer than a model.
    """

    code: CodeType | None
    captured: Mapping[str, str]

    def prefixes(self) -> dict[str, str]:
        """The prefixes of the call that is running."""
        now, around = self._locals(), roots()
        return {s: place(now[s], around)[1] if s in now else p for s, p in self.captured.items()}

    def _locals(self) -> dict[str, nn.Module]:
        """The modules in its local variables in this call."""
        at = _position(self.code) if self.code else None
        running = (frame.f_locals for frame in _stack() if _position(frame.f_code) == at)
        return _modules_in("L", next(running, {}))


def _position(code: CodeType) -> tuple[str, str, int]:
    """What Dynamo's code has in common with the code it replaces."""
    return code.co_filename, code.co_name, code.co_firstlineno


def compiled_frame() -> Frame:
    """The frame that Dynamo compiles now."""
    return Frame(code(), prefixes())
