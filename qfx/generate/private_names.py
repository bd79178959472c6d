"""Names of transformers that have no public way to them. Tests fail where one is gone."""

from __future__ import annotations

ATTENTION = "_attn_implementation"  # of a config: the name under which what attends is looked up
PREPARES_CACHE = "_prepare_cache_for_generation"  # of a model: is told how long a text may become
