"""Buffers that no file has, of models on the meta device: who knows how to make them says so."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

MAKERS: list[Callable[[nn.Module], dict[str, Tensor]]] = []  # qfx.hf adds that of transformers


def buffers_of(skeleton: nn.Module) -> dict[str, Tensor]:
    """Values, by name, for buffers of `skeleton` that are on the meta device."""
    return {name: tensor for make in MAKERS for name, tensor in make(skeleton).items()}
