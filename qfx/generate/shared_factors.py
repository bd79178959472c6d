"""Shares the smoothing factors of linears that read one input.

Each module has its own copy of the factor. With separate tensors, rewriting could not detect that
q, k and v quantize the same floats in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from qfx.generate.step_modules import is_served
from qfx.host.tensors import has_values


def equal_factors(model: nn.Module) -> dict[str, str]:
    """Returns, for each linear whose factor equals that of an earlier linear, the name of the
    earlier one.

    A program reads one tensor for all of them, so this is part of the key of a program.
    """
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
    """Gives linears the factor tensor of the linear that `equal_factors` found. `twin`: a copy of
    the model whose dictionaries of buffers are not those of the user's model."""
    for name, other in same.items():
        twin.get_submodule(name)._buffers["factor"] = twin.get_submodule(other)._buffers["factor"]
