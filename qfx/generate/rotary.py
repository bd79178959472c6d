"""Rotary embeddings that depend on more than one position of each token.

With dynamic scaling, the frequencies change once a sequence is longer than the model was trained
for. Up to that length they are constants, which programs require. With sections (`mrope_section`,
of models that read images), a position has separate axes for time, height and width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def constant_up_to(model: nn.Module) -> int | None:
    """Returns the number of tokens of a sequence up to which the frequencies are constant; None if
    they always are."""
    return min((module.original_max_seq_len for module in _dynamic(model)), default=None)


def axes_of_positions(config: Any) -> int | None:
    """Returns A for position_ids [A, B, T] that generate passes; None if it passes [B, T]."""
    rotary = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return 4 if "mrope_section" in rotary else None  # for text, and three axes of images


def keep_frequencies(model: nn.Module) -> None:
    """Makes all modules of `model`, a copy that is captured, use the frequencies for short
    sequences, also if the model has processed longer ones before."""
    for module in _dynamic(model):
        module.rope_type = "default"
        if module.max_seq_len_cached != module.original_max_seq_len:
            module._buffers["inv_freq"] = module.original_inv_freq


def _dynamic(model: nn.Module) -> Iterator[Any]:
    """Yields the modules that dynamic_rope_update of transformers changes, without those that have
    frequencies for each kind of layers."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str) and "dynamic" in kind and hasattr(module, "original_inv_freq"):
            yield module
