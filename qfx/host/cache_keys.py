"""Additions to the keys of PyTorch's caches: what compiled code depends on besides the graph.

Backward formulas are traced into the compiled code, and AOTAutograd's cache on disk knows only the
forward graph. Without an addition to the key, a changed formula would be served from an old cache.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch


def in_cache_keys(digest: str) -> AbstractContextManager[Any]:
    """Returns a context in which `digest` is part of the cache keys, after the user's own tag."""
    config = torch.compiler.config
    return config.patch(cache_key_tag=f"{config.cache_key_tag}{digest}")  # type: ignore[attr-defined,no-any-return]
