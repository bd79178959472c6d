"""Room in a cache of fixed length: memory for texts, and checks that tokens fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def make_room(
    layers: Sequence[Any], shapes: Sequence[tuple[int, int]], texts: int, size: int
) -> None:
    """Gives layers of a cache, which may have none yet, memory for `texts`, filled up to `size`.
    `shapes`: (heads, features) of each."""
    for layer, (heads, features) in zip(layers, shapes, strict=True):
        if not layer.is_initialized:
            empty = torch.empty(size, heads, 0, features, dtype=torch.float32, device="cpu")
            layer.lazy_initialization(empty, empty)
            layer.texts = texts
        layer.make_room(size)


def check_request(length: int, capacity: int) -> None:
    """ValueError where a prompt and its answer of `length` tokens exceed the capacity."""
    if length > capacity:
        raise ValueError(
            f"the prompt and its answer are {length} tokens, which are more than the {capacity} "
            "that there is room for: ask for fewer (max_new_tokens), or "
            "compile_for_generate(model, max_length=...)"
        )


def check_step(count: int, first: int, capacity: int) -> None:
    """ValueError where `count` tokens after `first` others exceed the capacity."""
    if first + count > capacity:
        raise ValueError(
            f"{count} tokens behind {first} are more than the {capacity} that there is room for: "
            "compile_for_generate(model, max_length=...) says how many"
        )


def check_alike(layers: Sequence[Any]) -> None:
    """ValueError where layers of a cache hold different numbers of tokens, or one does not hold
    what its next query sees."""
    for layer in layers:
        if layer.seen != layers[0].seen:
            raise ValueError(
                f"layers of the cache hold {layers[0].seen} and {layer.seen} tokens, as after a "
                "crop that failed: read the text again"
            )
        layer.check_held()


def check_texts(layer: object, texts: int) -> None:
    """ValueError where a layer of a cache holds another number of texts."""
    held = getattr(layer, "texts", texts) if getattr(layer, "is_initialized", False) else texts
    if held != texts:
        raise ValueError(f"the cache holds {held} texts, and these tokens are of {texts}")
