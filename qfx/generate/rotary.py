"""Rotary embeddings that need more than a position of each token.

With dynamic scaling, frequencies change once a text is longer than the model was trained for; up to
there they are constants, as a program needs them. With sections (`mrope_section`, of models that
see images), a position has axes of its own for time, height and width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def constant_up_to(model: nn.Module) -> int | None:
    """The tokens of a text up to which no frequency changes; None where none ever does."""
    return min((module.original_max_seq_len for module in _dynamic(model)), default=None)


def axes_of_positions(config: Any) -> int | None:
    """The A of position_ids [A, B, T] that generate passes; None where it passes [B, T]."""
    rotary = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return 4 if "mrope_section" in rotary else None  # of text, and the three axes


def keep_frequencies(model: nn.Module) -> None:
    """Lets all modules of `model` compute with the frequencies of short texts, whatever they read
    before. The model is a copy that is captured."""
    for module in _dynamic(model):
        module.rope_type = "default"
        if module.max_seq_len_cached != module.original_max_seq_len:
            module._buffers["inv_freq"] = module.original_inv_freq


def _dynamic(model: nn.Module) -> Iterator[Any]:
    """As dynamic_rope_update of transformers knows them, without those of a kind for each layer."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str) and "dynamic" in kind and hasattr(module, "original_inv_freq"):
            yield module
