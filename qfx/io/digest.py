"""A digest of what qfx is: of its Python sources and of its extension."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

import qfx._C as _C


@lru_cache
def digest() -> str:
    files = [*sorted(Path(__file__).parents[1].rglob("*.py")), Path(_C.__file__)]
    total = hashlib.sha256()
    for file in files:
        total.update(file.name.encode() + file.read_bytes())
    return total.hexdigest()
