"""What the compiled code depends on besides the graph: a part of the keys of PyTorch's caches.

Backward formulas are traced into the compiled code, and AOTAutograd's cache on disk knows only the
forward graph. Without this a changed formula would be served from an old cache.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

import qfx._C as _C


@lru_cache
def digest() -> str:
    """A digest of qfx's Python sources and of its extension."""
    files = [*sorted(Path(__file__).parent.rglob("*.py")), Path(_C.__file__)]
    total = hashlib.sha256()
    for file in files:
        total.update(file.name.encode() + file.read_bytes())
    return total.hexdigest()


class Versioned(CustomGraphPass):
    """Changes nothing but the caches' keys; `then` is a pass the user asked for in this place."""

    def __init__(self, then: Any = None) -> None:
        self.then = then

    def __call__(self, graph: fx.Graph) -> None:
        if self.then is not None:
            self.then(graph)

    def uuid(self) -> Any:
        if self.then is None:
            return digest()
        inner = self.then.uuid() if isinstance(self.then, CustomGraphPass) else None
        return None if inner is None else (digest(), inner)  # None: the caches are left alone
