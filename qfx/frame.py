"""The frame Dynamo is compiling: which modules it holds, so that names are absolute and checkable.

After a graph break Dynamo compiles a submodule's forward as a frame of its own, and the names in
its graph are relative to that submodule. The modules whose methods are running further up the stack
complete them. Layers that are alike share what is compiled for one of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import CodeType, FrameType
from typing import Any

from torch import fx, nn

from qfx.capture import NAMED, SCHEME, Named, called_by, graphs, named_by_source
from qfx.config import Config
from qfx.patterns import decides_apart, names, names_in
from qfx.recipe import Recipe
from qfx.scheme import Scheme
from qfx.site import Match


def _translated() -> Any:
    """Dynamo's translator of the frame it compiles; None outside Dynamo."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # a second to import

    try:
        return InstructionTranslator.current_tx().output.root_tx
    except AttributeError:
        return None


def code() -> CodeType | None:
    """Of the frame that Dynamo is compiling."""
    frame = _translated()
    return None if frame is None else frame.f_code


def _modules_in(scope: str, variables: Mapping[str, Any]) -> dict[str, nn.Module]:
    return {f"{scope}['{k}']": v for k, v in variables.items() if isinstance(v, nn.Module)}


def _frame_modules() -> dict[str, nn.Module]:
    """Source expression -> module, for the modules the compiled frame can name."""
    frame = _translated()
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


def _running_modules() -> list[nn.Module]:
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
    return [*_frame_modules().values(), *_running_modules()]


def _roots(recipe: Recipe | None = None) -> list[nn.Module]:
    """The running modules, from the one that names are relative to: the outermost, or that which
    has most of the recipe's names, for a calibrated model may run inside another."""
    running = _running_modules()
    if recipe is None or not running:
        return running
    wanted = {site.name for site in recipe.sites}
    known = [len(wanted & {name for name, _ in module.named_modules()}) for module in running]
    return running[known.index(max(known)) :]


def _place(module: nn.Module, roots: Sequence[nn.Module]) -> tuple[nn.Module, str]:
    """The first root that holds the module, and its path there."""
    for root in roots:
        for path, part in root.named_modules():
            if part is module:
                return root, path
    return module, ""


def prefixes(recipe: Recipe | None = None) -> dict[str, str]:
    """Source expression of each module of the compiled frame -> its dotted path in the model."""
    roots = _roots(recipe)
    return {source: _place(module, roots)[1] for source, module in _frame_modules().items()}


@dataclass(frozen=True)
class Frame:
    """A captured frame: its code and the prefixes it had. Dynamo may run it for other modules.

    It holds no module itself, for what Dynamo compiled lives longer than a model.
    """

    code: CodeType | None
    captured: Mapping[str, str]

    def prefixes(self) -> dict[str, str]:
        """The prefixes of the call that is running."""
        roots, now = _roots(), self._locals()
        return {s: _place(now[s], roots)[1] if s in now else p for s, p in self.captured.items()}

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


def name_nodes(gm: fx.GraphModule, examples: Sequence[Any]) -> None:
    """Notes at each input of a captured graph what it is called, at each call which module made it.

    They are told by what they are, not by how the code reaches them; of several names, one by which
    the code does. What no module of the frame or of the stack has registered keeps Dynamo's name.
    """
    known, schemes, owner = _registered(), _schemes(), _owner()
    for node, example in zip(gm.graph.find_nodes(op="placeholder"), examples, strict=True):
        _note(node, named_by_source(node), known.get(id(example)))
    for node in (n for graph in graphs(gm) for n in graph.nodes if n.op != "placeholder"):
        if caller := called_by(node):
            _note(node, caller.named, known.get(caller.id))
            node.meta.update(schemes.get(caller.id, {}))
        elif owner:
            node.meta[NAMED] = Named(owner, "")


def _owner() -> str | None:
    """Source expression of the module whose method is compiled. What follows a graph break in it is
    a function that the method calls, with other arguments: then, of the modules it names, the
    innermost one that is running."""
    frame = _translated()
    if frame is None:
        return None
    first = frame.f_locals.get(next(iter(frame.f_code.co_varnames), None))
    named = {id(v): f"L['{k}']" for k, v in frame.f_locals.items() if isinstance(v, nn.Module)}
    candidates = (first, *reversed(_running_modules()))
    return next((named[id(m)] for m in candidates if id(m) in named), None)


def _note(node: fx.Node, said: Named | None, registered: Sequence[Named] | None) -> None:
    if registered:
        node.meta[NAMED] = said if said in registered else registered[0]


def _registered() -> dict[int | None, list[Named]]:
    """The id of each module, parameter and buffer -> its names below the frame's modules, and then
    in the model."""
    found: dict[int | None, list[Named]] = {}
    for root, module in [*_frame_modules().items(), *(("", m) for m in _running_modules())]:
        for path, part in chain(
            module.named_modules(remove_duplicate=False),
            module.named_parameters(remove_duplicate=False),
            module.named_buffers(remove_duplicate=False),
        ):
            found.setdefault(id(part), []).append(Named(root, path))
    return found


def _schemes() -> dict[int | None, dict[str, Scheme]]:
    """The id of each module of `qfx.nn` that has a scheme -> what its calls are noted with."""
    parts = (part for module in modules() for part in module.modules())
    having = ((id(part), getattr(part, "scheme", None)) for part in parts)
    return {key: {SCHEME: scheme} for key, scheme in having if isinstance(scheme, Scheme)}


def tie_to_modules(matches: Sequence[Match], config: Config) -> None:
    """Has Dynamo compile a layer apart where the configuration decides otherwise on its like.

    Where a graph break makes each layer a frame of its own, what is compiled for one serves all
    modules of its class.
    """
    roots = _roots(config.recipe)
    variables = getattr(_translated(), "f_locals", {})
    for name, module in ((n, v) for n, v in variables.items() if isinstance(v, nn.Module)):
        root, path = _place(module, roots)
        alike = [p for p, other in root.named_modules() if type(other) is type(module)]
        if path and decides_apart(config, matches, path, alike):
            _guard_identity(name)


def _guard_identity(variable: str) -> None:
    """Dynamo will not run what it compiles now for another value of this local variable. Where this
    guard tells modules apart, its limit of recompilations holds for each by itself."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import LocalSource

    install_guard(LocalSource(variable).make_guard(GuardBuilder.ID_MATCH))


def known_names(matches: Iterable[Match]) -> set[str]:
    """Every name a pattern may mean: the graph's own, and those of the modules around it."""
    known = {name for m in matches for name in (*names(m), m.name)}
    return known.union(*map(names_in, modules()))
