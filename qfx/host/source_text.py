"""Frees the source texts of graph modules, which torch.fx and linecache keep for the life of the
process.

Each `recompile` of an `fx.GraphModule` adds one, so that tracebacks and inspect can show its lines.
A text is useful only as long as the class of the module lives.
"""

from __future__ import annotations

import inspect
import linecache
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx
from torch.fx import graph_module

_TEXTS: dict[str, str] = graph_module._loader.eval_cache  # by the file names in code objects


@contextmanager
def released_source_texts() -> Iterator[None]:
    """Removes the source texts that are added inside this `with` block or decorated function: at
    its end, or together with the module for graph modules that live on. Texts added by other
    threads meanwhile are included."""
    before = {*_TEXTS}
    try:
        yield
    finally:
        added = {*_TEXTS} - before
        living = {_file_of(kind): kind for kind in _subclasses(fx.GraphModule)} if added else {}
        for name in added:
            if name in living:
                weakref.finalize(living[name], _remove, name).atexit = False
            else:
                _remove(name)


def _remove(name: str) -> None:
    _TEXTS.pop(name, None)
    linecache.cache.pop(name, None)


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    """Yields all subclasses of `kind`. Each graph module is the only instance of its class."""
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def _file_of(kind: type[Any]) -> str | None:
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code.co_filename if code else None
