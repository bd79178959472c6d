"""Masks: which places of a cache each query of a step sees, as the model's layers want them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qfx.ops.kv_blocks import TOKENS

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
    if text.model_type == "gpt_neo":
        return {"global": None, "local": int(text.window_size)}
    if kinds is None:
        return {"": size}
    if other := set(kinds) - {_FULL, _SLIDING}:
        raise ValueError(f"layers of {text.model_type} are {', '.join(sorted(other))}")
    return {kind: size if kind == _SLIDING else None for kind in sorted(set(kinds))}


class Places:
    """What steps are told of the places of a cache that has `length` of them, mostly as parts of
    tables: to compute so little each time takes as long as a layer does."""

    def __init__(self, windows: Mapping[str, int | None], length: int) -> None:
        self._length = length
        self._numbers = torch.arange(length, dtype=torch.int64, device="cpu")
        self._visible = [_table(length, min(w or length, length)) for w in windows.values()]

    def numbers(self, first: int, count: int) -> Tensor:
        """first, first + 1, ...: int64 [T], not to be written to."""
        return self._numbers[first : first + count]

    def table(self, texts: int) -> Tensor:
        """A block table in which each text has its own blocks: int32 [texts, L / 16]."""
        blocks = -(-self._length // TOKENS)
        own = torch.arange(texts, dtype=torch.int32, device="cpu")[:, None]
        return own.expand(texts, blocks).contiguous()

    def masks(self, places: Tensor, hidden: Tensor | None = None) -> list[Tensor]:
        """One for each kind, bool [B, 1, T, L], of queries at `places` int64 [B, T]; those of the
        place -1 see what the first place does. `hidden`: bool [B, L], what no query sees, or None.
        Not to be written to."""
        found = []
        for visible in self._visible:
            seen = visible[len(visible) - 1 - places.clamp(min=0)][:, None]
            found.append(seen if hidden is None else seen & ~hidden[:, None, None])
        return found


def _table(length: int, window: int) -> Tensor:
    """bool [L, L], row i what a query at the place L - 1 - i sees of the keys: a view of few."""
    ones = torch.zeros(2 * length - 1, dtype=torch.bool, device="cpu")
    ones[length - window : length] = True
    return ones.unfold(0, length, 1)


def named(windows: Mapping[str, int | None], masks: list[Tensor]) -> Any:
    """As the model's forward takes them."""
    if list(windows) == [""]:
        return masks[0]
    return dict(zip(windows, masks, strict=True))
