"""The frame (Python function call) that Dynamo compiles: the modules to which its variables refer,
and the modules that are running around it.

After a graph break Dynamo compiles a submodule's forward as a frame of its own, and the names in
its graph are relative to that submodule. The modules whose methods are running further up the stack
complete these names.
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
    """The circumstances in which a graph was captured: the compiled frame and the modules around
    it. `surroundings` determines them; outside Dynamo they are empty."""

    code: CodeType | None = None  # of the compiled frame
    variables: Mapping[str, Any] = field(default_factory=dict)  # local variables of the frame
    named: Mapping[str, nn.Module] = field(default_factory=dict)  # source expression -> module
    running: Sequence[nn.Module] = ()  # modules whose methods are on the stack, the outermost first

    @property
    def modules(self) -> list[nn.Module]:
        return [*self.named.values(), *self.running]

    def roots(self, wanted: Collection[str] = ()) -> Sequence[nn.Module]:
        """Returns the running modules, starting with the module to which names are relative. This
        is the outermost module, or the one with most of the `wanted` names, because a calibrated
        model may run inside another."""
        if not wanted or not self.running:
            return self.running
        known = [sum(name in wanted for name, _ in m.named_modules()) for m in self.running]
        return self.running[known.index(max(known)) :]

    def prefixes(self, wanted: Collection[str] = ()) -> dict[str, str]:
        """Returns a dict: source expression of each module of the frame -> its dotted path in the
        model."""
        around = self.roots(wanted)
        return {source: place(module, around)[1] for source, module in self.named.items()}

    @property
    def locals(self) -> dict[str, nn.Module]:
        """The modules among the local variables of the compiled frame."""
        return {k: v for k, v in self.variables.items() if isinstance(v, nn.Module)}

    def owner(self) -> str | None:
        """Returns the source expression of the module whose method is compiled. The code after a
        graph break in the method is a function with other arguments; in that case the owner is the
        innermost running module among those that this function names."""
        if self.code is None:
            return None
        first = self.variables.get(next(iter(self.code.co_varnames), ""))
        named = {id(module): f"L['{name}']" for name, module in self.locals.items()}
        candidates = (first, *reversed(self.running))
        return next((named[id(m)] for m in candidates if id(m) in named), None)


def surroundings() -> Surroundings:
    """Returns the surroundings of the frame that Dynamo is compiling, taken from this frame and the
    Python stack."""
    frame, running = _translated(), running_modules()
    if frame is None:
        return Surroundings(running=running)
    used = frame.f_code.co_names + frame.f_code.co_freevars
    globals_ = {k: frame.f_globals.get(k) for k in used}
    named = _modules_in("L", frame.f_locals) | _modules_in("G", globals_)
    return Surroundings(frame.f_code, frame.f_locals, named, running)


def _translated() -> Any:
    """Returns Dynamo's translator of the frame that it is compiling, or None outside Dynamo."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # a second to import

    try:
        return InstructionTranslator.current_tx().output.root_tx
    except AttributeError:
        return None


def _modules_in(scope: str, variables: Mapping[str, Any]) -> dict[str, nn.Module]:
    return {f"{scope}['{k}']": v for k, v in variables.items() if isinstance(v, nn.Module)}


def _stack() -> Iterator[FrameType]:
    """Yields the running frames, the innermost first."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        yield frame


def running_modules() -> list[nn.Module]:
    """Returns the modules whose methods are on the Python stack, the outermost first. Modules that
    only wrap another are left out, because they would put their own names before the model's."""
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


def modules_to_run() -> list[nn.Module]:
    """Returns the modules whose methods are on the Python stack, or the module that is compiled if
    its method is not there yet, as with classes of torch.nn."""
    from torch._dynamo.eval_frame import OptimizedModule

    if found := running_modules():
        return found
    owners = (frame.f_locals.get("self") for frame in _stack())
    wrapper = next((owner for owner in owners if isinstance(owner, OptimizedModule)), None)
    return [] if wrapper is None else [wrapper._orig_mod]


def place(module: nn.Module, around: Sequence[nn.Module]) -> tuple[nn.Module, str]:
    """Returns the first of the modules `around` that contains `module`, and the path of `module` in
    it. If none does, returns `module` itself and ''."""
    for root in around:
        for path, part in root.named_modules():
            if part is module:
                return root, path
    return module, ""


@dataclass(frozen=True)
class Frame:
    """A captured frame: its code, and the names that its modules had at its capture (`prefixes`).
    Dynamo may run it again for other modules.

    It holds no module itself, because Dynamo's compiled code outlives the model.
    """

    code: CodeType | None = None
    captured: Mapping[str, str] = field(default_factory=dict)

    def prefixes(self) -> dict[str, str]:
        """Returns, for the call that is running: source expression of each module -> its path in
        the model."""
        now, around = self._locals(), running_modules()
        return {s: place(now[s], around)[1] if s in now else p for s, p in self.captured.items()}

    def _locals(self) -> dict[str, nn.Module]:
        """Returns the modules among the frame's local variables in the current call."""
        at = _position(self.code) if self.code else None
        running = (frame.f_locals for frame in _stack() if _position(frame.f_code) == at)
        return _modules_in("L", next(running, {}))


def _position(code: CodeType) -> tuple[str, str, int]:
    """Returns the file, name and first line of a code object, which Dynamo's code has in common
    with the code that it replaces."""
    return code.co_filename, code.co_name, code.co_firstlineno
