"""Fingerprints of the code that a model's modules may call, as it is in memory now.

They are computed from the functions in memory and not from files, so a function that was replaced
at run time (a monkey patch) changes them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qfx.generate.distributions import identity
from qfx.generate.fingerprint import Fingerprinter, NoFingerprint, code_digest

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_PATCHED = (torch, F, torch.Tensor, torch.nn)  # places where users replace functions
_RANDOM = {"transformers.utils.hub.SESSION_ID"}  # differs in each process
_DEPTH = 4  # nesting depth of containers, and of functions in closures
_TORCH = str(Path(torch.__file__).parent)


def code_fingerprints(
    fingerprint: Fingerprinter, homes: Iterable[str], classes: Iterable[type]
) -> Iterator[str]:
    """Yields fingerprints of the `classes` of a model's modules and of the code that they may call.

    This code is the content (functions, classes, numbers and tables) of the Python modules `homes`,
    and of modules that these refer to, in the same packages or outside of installed packages. Other
    installed packages are represented by the names and versions of their distributions. Functions
    of torch that users replaced are included.
    """
    scan = _Scan(fingerprint, {name.partition(".")[0] for name in homes})
    for kind in dict.fromkeys(base for each in classes for base in each.__mro__):
        yield f"{kind.__module__}.{kind.__qualname__} {scan.members(kind)}"
    done, todo = set[str](), sorted(homes)
    while todo:
        name = todo.pop()
        if name in done:
            continue
        done.add(name)
        if not scan.follows(name):
            continue
        scan.met = set()
        yield f"{name}: {scan.module(sys.modules[name])}"
        todo += sorted(scan.met - done)
    yield from sorted({found for name in done if (found := _distribution(name))})
    for place in _PATCHED:
        yield from scan.foreign(place)


class _Scan:
    def __init__(self, fingerprint: Fingerprinter, packages: set[str]) -> None:
        self.fingerprint, self.packages = fingerprint, packages - sys.stdlib_module_names
        self.met: set[str] = set()
        self.strict = False  # whether the current module is outside of installed packages

    def follows(self, name: str) -> bool:
        """Whether the content of the Python module `name` becomes part of the fingerprint. The
        contents of qfx and torch do not: the digest of qfx and the version of torch are in the key
        of a program."""
        module, package = sys.modules.get(name), name.partition(".")[0]
        if name == "__main__":
            raise NoFingerprint("functions of __main__ are called")
        if type(module) is not ModuleType or package in ("torch", "qfx", "builtins"):
            return False  # the content of a lazy module depends on its use
        return package in self.packages or not identity(module)

    def module(self, module: ModuleType) -> str:
        """Returns a fingerprint of the functions, classes, numbers, names and tables of a
        module."""
        self.strict = not identity(module)
        attributes = {n: v for n, v in vars(module).items() if not n.startswith("__")}
        members = (
            (n, v) for n, v in sorted(attributes.items()) if not _varies(module.__name__, n, v)
        )
        return "; ".join(f"{name} {self.value(value)}" for name, value in members)

    def value(self, value: Any, depth: int = 0) -> str:
        """Returns a fingerprint of a value. Values that are not inspected are represented by their
        class."""
        kind = type(value)
        if kind in _PLAIN:
            return f"{kind.__name__} {value!r}"
        value = getattr(value, "__func__", value)
        if isinstance(value, FunctionType):
            return self.function(value, depth)
        if isinstance(value, type):
            return self.kind(value, depth)
        if isinstance(value, ModuleType):
            self.met.add(value.__name__)
            return f"module {value.__name__}"
        if isinstance(value, property):
            return str([self.value(v, depth) for v in (value.fget, value.fset)])
        if depth < _DEPTH and kind in (list, tuple):
            return str([self.value(each, depth + 1) for each in value])
        if depth < _DEPTH and kind in (set, frozenset):
            return str(sorted(self.value(each, depth + 1) for each in value))
        if depth < _DEPTH and kind is dict:
            return str([(self.value(k), self.value(v, depth + 1)) for k, v in value.items()])
        self.met.add(kind.__module__)
        if self.strict and depth == 0:
            with suppress(NoFingerprint):
                return self.fingerprint(value)
        if isinstance(value, Tensor):
            raise NoFingerprint(f"a global tensor {tuple(value.shape)}")
        wrapped = getattr(value, "__wrapped__", None)
        inside = self.function(wrapped, depth) if isinstance(wrapped, FunctionType) else ""
        return f"a {kind.__module__}.{kind.__qualname__} {inside}"

    def function(self, value: FunctionType, depth: int) -> str:
        self.met |= {value.__module__, value.__globals__.get("__name__", "")}
        found = [f"{value.__module__}.{value.__qualname__} {code_digest(value.__code__)}"]
        if depth < _DEPTH:
            defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            found += [self.value(each, depth + 1) for each in defaults]
            for cell in value.__closure__ or ():
                found.append(self.value(_content(cell), depth + 1))
        return " ".join(found)

    def kind(self, value: type, depth: int) -> str:
        self.met.add(value.__module__)
        name = f"{value.__module__}.{value.__qualname__}"
        return f"{name} {self.members(value)}" if depth == 0 and self.follows(name) else name

    def members(self, value: type) -> str:
        """Returns a fingerprint of the attributes that the class itself defines."""
        attributes = [
            (n, v) for n, v in vars(value).items() if n not in ("__dict__", "__weakref__")
        ]
        return str([(name, self.value(v, 1)) for name, v in sorted(attributes)])

    def foreign(self, place: Any) -> Iterator[str]:
        """Yields fingerprints of Python functions in `place`, a module or class of torch, that do
        not come from torch."""
        for name, value in sorted(vars(place).items()):
            value = getattr(value, "__func__", value)
            if isinstance(value, FunctionType) and not _is_torchs(value.__code__.co_filename):
                yield f"{place.__name__}.{name} {self.function(value, 0)}"


def _distribution(name: str) -> str:
    """Returns the distributions that the Python module `name` comes from. Returns '' for torch and
    qfx, whose version and digest are in the key of a program, and for modules that are not
    installed."""
    module = sys.modules.get(name)
    known = name.partition(".")[0] in ("torch", "qfx")
    return "" if module is None or known else identity(module)


def _varies(module: str, name: str, value: Any) -> bool:
    """Whether the attribute `name` of a module differs from process to process: a random number, or
    a submodule, which is an attribute of its package only once it was imported."""
    own = isinstance(value, ModuleType) and value.__name__ == f"{module}.{name}"
    return own or f"{module}.{name}" in _RANDOM


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet filled
        return None


def _is_torchs(path: str) -> bool:
    return path.startswith((_TORCH, "<"))
