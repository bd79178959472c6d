"""Allocates caches with a fixed capacity, and checks that the tokens of a call fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def make_room(
    layers: Sequence[Any], shapes: Sequence[tuple[int, int]], batch: int, size: int
) -> None:
    """Gives the layers of a cache memory for `batch` sequences, padded to a batch size of `size`.

    Layers that are not initialized are initialized. `shapes`: (heads, features) of each layer.
    """
    for layer, (heads, features) in zip(layers, shapes, strict=True):
        if not layer.is_initialized:
            empty = torch.empty(size, heads, 0, features, dtype=torch.float32, device="cpu")
            layer.lazy_initialization(empty, empty)
            layer.batch = batch
        layer.make_room(size)


def check_request(length: int, capacity: int) -> None:
    """Raises ValueError if prompt and generated tokens together, `length`, exceed the capacity."""
    if length > capacity:
        raise ValueError(
            f"the prompt and the new tokens are {length} tokens, and the cache has room for "
            f"{capacity}: ask for fewer (max_new_tokens), or "
            "compile_for_generate(model, max_length=...)"
        )


def check_step(count: int, first: int, capacity: int) -> None:
    """Raises ValueError if `count` tokens after `first` others exceed the capacity."""
    if first + count > capacity:
        raise ValueError(
            f"{count} tokens after {first} do not fit into a cache of {capacity}: "
            "compile_for_generate(model, max_length=...) says how many"
        )


def check_alike(layers: Sequence[Any]) -> None:
    """Raises ValueError if the layers of a cache hold different numbers of tokens, or if one of
    them no longer holds tokens that its next query attends to."""
    for layer in layers:
        if layer.seen != layers[0].seen:
            raise ValueError(
                f"layers of the cache hold {layers[0].seen} and {layer.seen} tokens, as after a "
                "crop that failed: read the text again"
            )
        layer.check_not_overwritten()


def check_batch_size(layer: object, batch: int) -> None:
    """Raises ValueError if a layer of a cache holds another number of sequences than `batch`."""
    of_cache = getattr(layer, "batch", batch) if getattr(layer, "is_initialized", False) else batch
    if of_cache != batch:
        raise ValueError(f"the cache has a batch size of {of_cache}, and these tokens have {batch}")
