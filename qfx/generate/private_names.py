"""Private names of transformers that have no public equivalent. Tests fail if one is removed."""

from __future__ import annotations

ATTENTION = "_attn_implementation"  # attribute of a config: the name of its attention function
PREPARES_CACHE = "_prepare_cache_for_generation"  # method of a model: gets the largest length
