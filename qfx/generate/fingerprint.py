"""Fingerprints of Python values: text that is the same in every process for equal values.

Locks, files, objects of C extensions and large tensors have no fingerprint and raise
`NoFingerprint`, since their effect is not known.
"""

from __future__ import annotations

import enum
import hashlib
import re
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import torch
from torch import Tensor

from qfx.host.operators import OpOverload, OpOverloadPacket
from qfx.io.digest import digest_of

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
_TORCH = (
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, OpOverload,
    OpOverloadPacket,
)  # fmt: skip
_SEQUENCES = (list, tuple, set, frozenset)
_DICTS = (dict, OrderedDict, defaultdict)
_MOST_BYTES = 1 << 16  # largest tensor that is not a parameter or buffer
_MADE_IN_PYTHON = 1 << 9  # flag of a class: "heap type"
# Without influence on results: the first differs in each process, the second is set once hidden
# states were requested.
_SKIPPED = {"_original_object_hash", "_output_capturing_hooks_installed"}


class NoFingerprint(Exception):
    """Raised if the effect of a value cannot be determined."""


class Fingerprinter:
    """Computes fingerprints of several values. A value that occurs again is represented by a
    reference to its first occurrence.

    `homes`: the Python modules whose functions and classes occurred.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        """`names`: id of an object -> the name that represents it. Such objects are not
        inspected."""
        self.names = names
        self.homes: set[str] = set()
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []  # so that nothing else gets its id

    def __call__(self, value: Any) -> str:
        """Returns the fingerprint of `value`. Raises NoFingerprint, which names the part that has
        none."""
        if type(value) in _PLAIN:
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, _TORCH):
            return f"{type(value).__name__} {value}"
        if id(value) in self.names:
            return f"the {self.names[id(value)]}"
        if id(value) in self._seen:
            return f"#{self._seen[id(value)]}"
        self._seen[id(value)] = len(self._seen)
        self._kept.append(value)
        return self._new(value)

    def _new(self, value: Any) -> str:
        for kind, printer in _KINDS.items():
            if isinstance(value, kind):
                return printer(self, value)
        if type(value) in _SEQUENCES or _is_named_tuple(value):
            items = [self(each) for each in value]
            ordered = sorted(items) if isinstance(value, set | frozenset) else items
            return f"{self.named(type(value))}[{', '.join(ordered)}]"
        if type(value) in _DICTS:
            default = self(getattr(value, "default_factory", None))
            return f"{type(value).__name__}{self.items(value)} {default}"
        return self._object(value)

    def items(self, values: Mapping[Any, Any]) -> str:
        """Returns the fingerprint of a dict, which depends on the order of its items."""
        items = (f"{self(k)}: {self(v)}" for k, v in values.items() if k not in _SKIPPED)
        return "{" + ", ".join(items) + "}"

    def named(self, kind: type) -> str:
        """Returns the name of a class. Raises NoFingerprint if that name does not refer to the
        class."""
        found: Any = _home(kind.__module__, kind)
        for name in kind.__qualname__.split("."):
            found = getattr(found, name, None)
        if found is not kind:
            raise NoFingerprint(
                f"the class {kind.__qualname__}, which {kind.__module__} does not have"
            )
        self.homes.add(kind.__module__)
        return f"{kind.__module__}.{kind.__qualname__}"

    def _object(self, value: Any) -> str:
        kind = type(value)
        if not all(each is object or each.__flags__ & _MADE_IN_PYTHON for each in kind.__mro__):
            raise NoFingerprint(f"a {kind.__module__}.{kind.__qualname__}")
        attributes = dict(getattr(value, "__dict__", {}))
        if is_dataclass(value):
            attributes |= {each.name: getattr(value, each.name) for each in fields(value)}
        elif any(getattr(each, "__slots__", ()) for each in kind.__mro__):
            raise NoFingerprint(f"a {kind.__qualname__} with slots")
        return f"{self.named(kind)}{self.items(dict(sorted(attributes.items())))}"

    def _function(self, value: FunctionType) -> str:
        home = value.__globals__.get("__name__", "")
        if vars(_home(home, value)) is not value.__globals__:
            raise NoFingerprint(f"the function {value.__qualname__}, which is of no module")
        self.homes.add(home)
        cells = [self(cell.cell_contents) for cell in value.__closure__ or ()]
        defaults = self((value.__defaults__, value.__kwdefaults__))
        where = f"{value.__module__}.{value.__qualname__}"
        return f"{where} {code_digest(value.__code__)} {defaults} {cells}"

    def _builtin(self, value: BuiltinFunctionType) -> str:
        owner = value.__self__
        if owner is not None and not isinstance(owner, ModuleType | type):
            raise NoFingerprint(f"{value.__qualname__} of an object")
        return f"{value.__module__}.{value.__qualname__}"

    def _tensor(self, value: Tensor) -> str:
        plain = type(value) in (Tensor, torch.nn.Parameter) and value.device.type == "cpu"
        if not plain or value.numel() * value.element_size() > _MOST_BYTES:
            raise NoFingerprint(f"a tensor {tuple(value.shape)} that is no parameter and no buffer")
        kind = (value.dtype, tuple(value.shape), value.stride(), value.is_conj(), value.is_neg())
        return f"tensor {kind} {digest_of(value)}"

    def _nothing(self, value: Any) -> str:
        raise NoFingerprint(f"a {type(value).__name__} that is no part of the model")


_Print = Callable[[Fingerprinter, Any], str]
_KINDS: dict[type, _Print] = {
    Tensor: Fingerprinter._tensor,
    torch.nn.Module: Fingerprinter._nothing,
    FunctionType: Fingerprinter._function,
    BuiltinFunctionType: Fingerprinter._builtin,
    MethodType: lambda printer, v: f"{printer(v.__func__)} of {printer(v.__self__)}",
    partial: lambda printer, v: f"partial {printer((v.func, v.args, v.keywords, vars(v)))}",
    ModuleType: lambda printer, v: f"module {v.__name__}",
    SimpleNamespace: lambda printer, v: f"namespace {printer.items(dict(sorted(vars(v).items())))}",
    enum.Enum: lambda printer, v: f"{printer.named(type(v))}.{v.name}",
    re.Pattern: lambda printer, v: f"pattern {v.pattern!r} {v.flags}",
    type: lambda printer, v: printer.named(v),
}


def _home(name: str, value: Any) -> ModuleType:
    found = sys.modules.get(name)
    if found is None or name == "__main__":
        raise NoFingerprint(f"{value.__qualname__} of {name}")
    return found


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


_codes: dict[CodeType, str] = {}


def code_digest(code: CodeType) -> str:
    """Returns a digest of a code object that does not depend on its file and line numbers."""
    if code not in _codes:
        _codes[code] = hashlib.sha256("\n".join(_parts(code)).encode()).hexdigest()[:32]
    return _codes[code]


def _parts(code: CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr((code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars))
    yield repr((code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags))
    yield getattr(code, "co_exceptiontable", b"").hex()  # Python 3.10 has none
    for constant in code.co_consts:
        yield _constant(constant)


def _constant(value: Any) -> str:
    if isinstance(value, CodeType):
        return code_digest(value)
    if isinstance(value, tuple | frozenset):
        items = [_constant(each) for each in value]
        return f"{type(value).__name__} {sorted(items) if isinstance(value, frozenset) else items}"
    return f"{type(value).__name__} {value!r}"
