"""What the compiled code depends on besides the graph: a part of the keys of PyTorch's caches.

Backward formulas are traced into the compiled code, and AOTAutograd's cache on disk knows only the
forward graph. Without this a changed formula would be served from an old cache.
"""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

import qfx._C as _C


@lru_cache
def digest() -> str:
    """A digest of qfx's Python sources and of its extension."""
    files = [*sorted(Path(__file__).parent.rglob("*.py")), Path(_C.__file__)]
    total = hashlib.sha256()
    for file in files:
        total.update(file.name.encode() + file.read_bytes())
    return total.hexdigest()


def in_cache_keys() -> AbstractContextManager[Any]:
    """What is compiled inside has the digest in its cache keys, after a tag of the user's own."""
    config = torch.compiler.config
    return config.patch(cache_key_tag=f"{config.cache_key_tag}qfx-{digest()}")  # type: ignore[attr-defined,no-any-return]
