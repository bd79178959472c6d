"""The least K of an int8 matmul, derived from the number of operations."""

from __future__ import annotations

_PER_OUTPUT = 6  # operations per output that only int8 has: (G1), (E1), (P1)
_WIDTH = 32 // 8  # int8 elements that replace one float32 in a vector register
LEAST_K = _PER_OUTPUT * _WIDTH // (_WIDTH - 1)


def why_few_features(k: int | None) -> str | None:
    """Returns why a matmul over `k` features stays float unless a recipe decides otherwise. Returns
    None if it does not, or if `k` is unknown.

    Int8 saves at most `k * (1 - 1 / 4)` multiply-adds of an output and adds 6 operations to it
    (docs/numerics.md (P1)), so with fewer than 8 features it takes more than it saves.
    """
    if k is None or k >= LEAST_K:
        return None
    return f"K={k}: below {LEAST_K} features int8 takes more operations than it saves"
