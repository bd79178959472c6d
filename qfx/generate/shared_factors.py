"""Smoothing factors of linears that read one input, as one tensor: each module keeps a copy of its
own, by which rewriting could not tell that q, k and v quantize the same floats in the same way."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from qfx.generate.step_modules import is_served
from qfx.host.tensors import has_values


def equal_factors(model: nn.Module) -> dict[str, str]:
    """The linears that have the factor of an earlier one, each with the name of that one.

    A program reads one tensor for all of them, so this is part of what it is made of."""
    first: dict[tuple[str, bytes], str] = {}
    same: dict[str, str] = {}
    for name, module in model.named_modules():
        factor = module.factor if is_served(module) else None
        if factor is not None and has_values(factor):
            key = str(factor.device), factor.cpu().numpy().tobytes()
            if (other := first.setdefault(key, name)) != name:
                same[name] = other
    return same


def share_factors(twin: nn.Module, same: Mapping[str, str]) -> None:
    """Gives linears the very factors of those that `equal_factors` found. `twin`: modules of those
    names whose dictionaries of buffers are not those of a user's model."""
    for name, other in same.items():
        twin.get_submodule(name)._buffers["factor"] = twin.get_submodule(other)._buffers["factor"]
