"""Buffers that are in no file, for models on the meta device; libraries register how to compute
them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

MAKERS: list[Callable[[nn.Module], dict[str, Tensor]]] = []  # qfx.hf adds that of transformers


def buffers_of(skeleton: nn.Module) -> dict[str, Tensor]:
    """Returns values, by name, for buffers of `skeleton` that are on the meta device."""
    return {name: tensor for make in MAKERS for name, tensor in make(skeleton).items()}
