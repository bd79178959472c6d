"""The frame that Dynamo compiles: which modules it can name, and which are running around it.

After a graph break Dynamo compiles a submodule's forward as a frame of its own, and the names in
its graph are relative to that submodule. The modules whose methods are running further up the stack
complete them.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Surroundings:
    """What is around a graph while it is captured. Read once, by `surroundings`; outside Dynamo
    nothing is."""

    code: CodeType | None = None  # of the compiled frame
    variables: Mapping[str, Any] = field(default_factory=dict)  # its local ones
    named: Mapping[str, nn.Module] = field(default_factory=dict)  # source expression -> module
    running: Sequence[nn.Module] = ()  # whose methods are on the stack, the outermost first

    @property
    def modules(self) -> list[nn.Module]:
        return [*self.named.values(), *self.running]

    def roots(self, wanted: Collection[str] = ()) -> Sequence[nn.Module]:
        """The running modules, from the one that names are relative to: the outermost, or that
        which has most of the `wanted` names, for a calibrated model may run inside another."""
        if not wanted or not self.running:
            return self.running
        known = [sum(name in wanted for name, _ in m.named_modules()) for m in self.running]
        return self.running[known.index(max(known)) :]

    def prefixes(self, wanted: Collection[str] = ()) -> dict[str, str]:
        """Source expression of each module of the frame -> its dotted path in the model."""
        around = self.roots(wanted)
        return {source: place(module, around)[1] for source, module in self.named.items()}

    @property
    def locals(self) -> dict[str, nn.Module]:
        """The modules among the local variables of the compiled frame."""
        return {k: v for k, v in self.variables.items() if isinstance(v, nn.Module)}

    def owner(self) -> str | None:
        """Source expression of the module whose method is compiled. What follows a graph break in
        it is a function that the method calls, with other arguments: then, of the modules it names,
        the innermost one that is running."""
        if self.code is None:
            return None
        first = self.variables.get(next(iter(self.code.co_varnames), ""))
        named = {id(module): f"L['{name}']" for name, module in self.locals.items()}
        candidates = (first, *reversed(self.running))
        return next((named[id(m)] for m in candidates if id(m) in named), None)


def surroundings() -> Surroundings:
    """Of the frame that Dynamo compiles now, and of the running Python stack."""
    frame, running = _translated(), running_modules()
    if frame is None:
        return Surroundings(running=running)
    used = frame.f_code.co_names + frame.f_code.co_freevars
    globals_ = {k: frame.f_globals.get(k) for k in used}
    named = _modules_in("L", frame.f_locals) | _modules_in("G", globals_)
    return Surroundings(frame.f_code, frame.f_locals, named, running)


def _translated() -> Any:
    """Dynamo's translator of the frame it compiles; None outside Dynamo."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # a second to import

    try:
        return InstructionTranslator.current_tx().output.root_tx
    except AttributeError:
        return None


def _modules_in(scope: str, variables: Mapping[str, Any]) -> dict[str, nn.Module]:
    return {f"{scope}['{k}']": v for k, v in variables.items() if isinstance(v, nn.Module)}


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


def place(module: nn.Module, around: Sequence[nn.Module]) -> tuple[nn.Module, str]:
    """The first of the modules that holds this one, and its path there; else itself."""
    for root in around:
        for path, part in root.named_modules():
            if part is module:
                return root, path
    return module, ""


@dataclass(frozen=True)
class Frame:
    """A captured frame: its code and the prefixes it had. Dynamo may run it for other modules.

    It holds no module itself, for what Dynamo compiled lives longer than a model.
    """

    code: CodeType | None = None
    captured: Mapping[str, str] = field(default_factory=dict)

    def prefixes(self) -> dict[str, str]:
        """The prefixes of the call that is running."""
        now, around = self._locals(), running_modules()
        return {s: place(now[s], around)[1] if s in now else p for s, p in self.captured.items()}

    def _locals(self) -> dict[str, nn.Module]:
        """The modules in its local variables in this call."""
        at = _position(self.code) if self.code else None
        running = (frame.f_locals for frame in _stack() if _position(frame.f_code) == at)
        return _modules_in("L", next(running, {}))


def _position(code: CodeType) -> tuple[str, str, int]:
    """What Dynamo's code has in common with the code it replaces."""
    return code.co_filename, code.co_name, code.co_firstlineno
