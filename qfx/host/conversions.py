"""Access to the conversions by which transformers made the weights of a model from those of a file.
Imports nothing of transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def with_operations(converter: Any, operations: Sequence[Any]) -> Any:
    """Returns a copy of a `WeightConverter` with other operations, for the same names."""
    patterns = converter._original_source_patterns, converter._original_target_patterns
    return converter.copy(*patterns, operations=[*operations])


def change_conversions(model: Any, change: Callable[[Any], Any]) -> None:
    """Replaces the conversions that a loaded model keeps for saving by `change` of them."""
    if hasattr(model, "_weight_conversions"):
        model._weight_conversions = change(model._weight_conversions)
