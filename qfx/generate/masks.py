"""Masks: which places of a cache each query of a step sees, as the model's layers want them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Masks = Mapping[str, Tensor] | Tensor
_FULL, _SLIDING = "full_attention", "sliding_attention"


def windows(config: Any) -> dict[str, int | None]:
    """Kind of layer -> how many keys back it sees, None of all; of a model whose layers are all
    alike the kind is "". ValueError for a kind that no mask is known of."""
    text = config.get_text_config(decoder=True)
    size = getattr(text, "sliding_window", None)
    if getattr(text, "attention_chunk_size", None) is not None:
        raise ValueError(f"{text.model_type} attends in chunks, for which no mask is known")
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        return {"": size}
    if other := set(kinds) - {_FULL, _SLIDING}:
        raise ValueError(f"layers of {text.model_type} are {', '.join(sorted(other))}")
    return {kind: size if kind == _SLIDING else None for kind in sorted(set(kinds))}


def step_masks(
    windows: Mapping[str, int | None], seen: Tensor | None, first: int, shape: tuple[int, int, int]
) -> list[Tensor]:
    """One for each kind, bool [B, 1, T, L] of `shape` (B, T, L): queries at the places first,
    first + 1, ... `seen`: bool [B, n], which places hold no padding, or None."""
    batch, count, length = shape
    keys = torch.arange(length)
    queries: Any = first if count == 1 else torch.arange(first, first + count)[:, None]
    visible = keys <= queries
    if seen is not None and not bool(seen.all()):
        padding = torch.ones(batch, length, dtype=torch.bool)
        padding[:, : seen.shape[1]] = seen
        visible = visible & padding[:, None, None]
    found = []
    for window in windows.values():
        own = visible if window is None else visible & (keys > queries - window)
        found.append(own.expand(batch, 1, count, length).contiguous())
    return found


def named(windows: Mapping[str, int | None], masks: list[Tensor]) -> Any:
    """As the model's forward takes them."""
    if list(windows) == [""]:
        return masks[0]
    return dict(zip(windows, masks, strict=True))
