"""Loading a state dict into modules that save a scheme with their numbers: all of a module's part
is checked before any of it is taken, and where `check_first` is registered, all of a model's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qfx.host.modules import register_once
from qfx.host.tensors import has_values
from qfx.values.floats import FLOATS

State = Mapping[str, Any]


class Checked(nn.Module):
    """A module that can tell what is wrong with its part of a state dict."""

    def check_state(self, state: State, prefix: str) -> None:
        """Raises ValueError for a part that cannot be loaded into this module."""
        raise NotImplementedError


def fault_of(module: Checked, state: State, prefix: str) -> str | None:
    try:
        module.check_state(state, prefix)
    except ValueError as why:
        return str(why)
    return None


def check_first(model: nn.Module) -> None:
    """Makes `model.load_state_dict` refuse a state dict before it takes anything from it.

    Without that each module refuses by itself, when those before it are loaded. What torch finds
    itself, missing and unexpected keys and sizes of other modules, it tells when all is loaded.
    """
    register_once(model, _check)


def _check(model: nn.Module, state: State, prefix: str, *_: Any) -> None:
    each = model.named_modules(prefix=prefix.removesuffix("."), remove_duplicate=False)
    checked = [(f"{name}." if name else "", m) for name, m in each if isinstance(m, Checked)]
    faults = [fault for at, m in checked if (fault := fault_of(m, state, at))]
    if faults:
        what = f"Error(s) in loading state_dict for {type(model).__name__}"
        raise RuntimeError("\n\t".join([f"{what}, of which nothing was taken:", *faults]))


def check_bias(state: State, prefix: str, bias: Tensor | None) -> None:
    name = f"{prefix}bias"
    if name in state and bias is not None:
        check_kind(state[name], name, FLOATS, bias.shape)


def check_kind(value: Any, name: str, dtypes: Sequence[torch.dtype], shape: Sequence[int]) -> None:
    """Raises ValueError unless `value` is a dense tensor of one of these types and this shape."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is of type {type(value).__name__}, expected a tensor")
    if value.dtype not in dtypes or value.shape != tuple(shape) or value.layout != torch.strided:
        layout = "" if value.layout == torch.strided else f"{value.layout} "
        wanted = " or ".join(map(str, dtypes))
        raise ValueError(
            f"{name} is {layout}{value.dtype} {list(value.shape)}, expected {wanted} {list(shape)}"
        )


def check_range(value: Tensor, name: str, least: int, most: int) -> None:
    """Raises ValueError for integers outside, which it names."""
    if value.numel() and has_values(value):
        low, high = (int(extreme) for extreme in value.aminmax())
        if low < least or high > most:
            worst = low if low < least else high
            raise ValueError(f"{name} holds {worst}, which is outside {least}..{most}")


def check_positive(value: Tensor, name: str) -> None:
    """Raises ValueError for what is not finite and positive, whose place it names."""
    if has_values(value):
        _check_all(value, name, (value > 0) & value.isfinite(), "finite and positive")


def check_finite(value: Tensor, name: str) -> None:
    """Raises ValueError for what is not finite, whose place it names."""
    if has_values(value):
        _check_all(value, name, value.isfinite(), "finite")


def _check_all(value: Tensor, name: str, right: Tensor, what: str) -> None:
    if not right.all():
        place = (~right).nonzero()[0].tolist()
        found = value[tuple(place)].item()
        raise ValueError(f"{name} holds {found} at {place}, which is not {what}")


def check_place(value: Any, name: str, held: Tensor, assign: bool) -> None:
    """Raises ValueError where a copy to the device of `held` would lose the values."""
    if isinstance(value, Tensor) and not assign and value.is_meta != held.is_meta:
        where = "the file is" if value.is_meta else "the module is"
        raise ValueError(f"{name}: {where} on the meta device; load_state_dict with assign=True")
