"""What compiled code depends on besides the graph: a part of the keys of PyTorch's caches.

Backward formulas are traced into the compiled code, and AOTAutograd's cache on disk knows only the
forward graph. Without this a changed formula would be served from an old cache.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


def in_cache_keys(digest: str) -> AbstractContextManager[Any]:
    """What is compiled inside has the digest in its cache keys, after a tag of the user's own."""
    config = torch.compiler.config
    return config.patch(cache_key_tag=f"{config.cache_key_tag}{digest}")  # type: ignore[attr-defined,no-any-return]
