"""Checks that a cache of fixed length has room for tokens."""

from __future__ import annotations


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


def check_texts(layer: object, texts: int) -> None:
    """ValueError where a layer of a cache holds another number of texts."""
    held = getattr(layer, "texts", texts) if getattr(layer, "is_initialized", False) else texts
    if held != texts:
        raise ValueError(f"the cache holds {held} texts, and these tokens are of {texts}")
