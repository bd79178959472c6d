"""Determines which layers of a model attend to all tokens, and which to a window of the last
ones."""

from __future__ import annotations

from typing import Any

from qfx.hf.kv_layer import KVLayer
from qfx.hf.sliding_kv_layer import LocalKVLayer, SlidingKVLayer
from qfx.ops.kv_blocks import ring_slots

_FULL, _SLIDING = "full_attention", "sliding_attention"
_GLOBAL, _LOCAL = "global", "local"  # names that GPT-Neo uses


def layer_kinds(config: Any) -> tuple[str, ...]:
    """Returns the kind of each layer that has its own keys and values, as transformers names it; ""
    if all layers of the model are the same. Raises ValueError if some layers have another state
    than keys and values."""
    text = config.get_text_config(decoder=True)
    shared: int = getattr(text, "num_kv_shared_layers", 0) or 0
    count = int(text.num_hidden_layers) - shared
    if text.model_type == "gpt_neo":
        return tuple(text.attention_layers)
    kinds = getattr(text, "layer_types", None) or [""] * count
    if other := set(kinds) - {_FULL, _SLIDING, "chunked_attention", ""}:
        raise ValueError(
            f"layers of {text.model_type} are {', '.join(sorted(other))}: an int8 cache holds keys "
            "and values of attention alone"
        )
    return tuple(kinds[:count])


def window_of(config: Any, kind: str) -> int | None:
    """Returns the number of keys, including its own, that a query sees in layers of this kind; None
    if it sees all."""
    text = config.get_text_config(decoder=True)
    if kind == _LOCAL:
        return int(text.window_size)
    return getattr(text, "sliding_window", None) if kind in (_SLIDING, "") else None


def windows(config: Any) -> dict[str, int | None]:
    """Returns, for each kind of layers, the number of keys that a query sees, or None if it sees
    all. Raises ValueError for a kind whose mask is not known."""
    text = config.get_text_config(decoder=True)
    if getattr(text, "attention_chunk_size", None) is not None:
        raise ValueError(f"{text.model_type} attends in chunks, for which no mask is known")
    if text.model_type == "gpt_neo":
        kinds = {_GLOBAL, _LOCAL}
    else:
        kinds = set(getattr(text, "layer_types", None) or [""])
    if other := kinds - {_FULL, _SLIDING, _GLOBAL, _LOCAL, ""}:
        raise ValueError(f"layers of {text.model_type} are {', '.join(sorted(other))}")
    return {kind: window_of(config, kind) for kind in sorted(kinds)}


def made_layer(
    kind: str, window: int | None, capacity: int | None, bits: tuple[int, int]
) -> KVLayer:
    """Creates a layer of a cache with room for `capacity` tokens of each sequence, or one that
    grows if `capacity` is None. With a `window` the layer is a ring of slots, unless the ring would
    be at least as large as `capacity`. `bits`: the bits of keys and of values."""
    if window is None or (capacity is not None and ring_slots(window) >= capacity):
        return KVLayer(capacity, *bits)
    ring = LocalKVLayer if kind == _LOCAL else SlidingKVLayer
    return ring(window, capacity, *bits)
