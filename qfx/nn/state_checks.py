"""Checks of the tensors of a state dict; each raises ValueError with the name of the tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qfx.host.tensors import has_values
from qfx.values.limits import FLOATS

State = Mapping[str, Any]
Kind = tuple[torch.dtype, tuple[int, ...]]  # of a tensor: its type and shape


def check_bias(state: State, prefix: str, bias: Tensor | None) -> None:
    name = f"{prefix}bias"
    if name in state and bias is not None:
        check_kind(state[name], name, FLOATS, bias.shape)


def check_kind(value: Any, name: str, dtypes: Sequence[torch.dtype], shape: Sequence[int]) -> None:
    """Raises ValueError unless `value` is a dense tensor with one of these dtypes and this
    shape."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is of type {type(value).__name__}, expected a tensor")
    if value.dtype not in dtypes or value.shape != tuple(shape) or value.layout != torch.strided:
        layout = "" if value.layout == torch.strided else f"{value.layout} "
        wanted = " or ".join(map(str, dtypes))
        raise ValueError(
            f"{name} is {layout}{value.dtype} {list(value.shape)}, expected {wanted} {list(shape)}"
        )


def check_parts(
    parts: State, prefix: str, names: Sequence[str], wanted: Mapping[str, Kind], requirement: str
) -> None:
    """Raises ValueError if a tensor of `names` is in only one of `parts` and `wanted`, or has
    another dtype or shape than in `wanted`. `requirement`: the end of the message, which says where
    the requirement comes from."""
    for name in names:
        if (name in parts) != (name in wanted):
            wrong = "is missing" if name in wanted else "is there in vain"
            raise ValueError(f"{prefix}{name} {wrong}: {requirement}")
    for name, (dtype, shape) in wanted.items():
        check_kind(parts[name], prefix + name, (dtype,), shape)


def check_range(value: Tensor, name: str, least: int, most: int) -> None:
    """Raises ValueError if an element of the integer tensor `value` lies outside `least`..`most`;
    the message contains the element."""
    if value.numel() and has_values(value):
        low, high = (int(extreme) for extreme in value.aminmax())
        if low < least or high > most:
            worst = low if low < least else high
            raise ValueError(f"{name} holds {worst}, which is outside {least}..{most}")


def check_positive(value: Tensor, name: str) -> None:
    """Raises ValueError if an element is not finite and positive; the message contains its
    index."""
    if has_values(value):
        _check_all(value, name, (value > 0) & value.isfinite(), "finite and positive")


def check_finite(value: Tensor, name: str) -> None:
    """Raises ValueError if an element is not finite; the message contains its index."""
    if has_values(value):
        _check_all(value, name, value.isfinite(), "finite")


def _check_all(value: Tensor, name: str, right: Tensor, what: str) -> None:
    if not right.all():
        place = (~right).nonzero()[0].tolist()
        found = value[tuple(place)].item()
        raise ValueError(f"{name} holds {found} at {place}, which is not {what}")


def check_place(value: Any, name: str, own: Tensor, assign: bool) -> None:
    """Raises ValueError if only one of `value` and the module's tensor `own` is on the meta device,
    unless `assign`: a copy of `value` into the module would have no values."""
    if isinstance(value, Tensor) and not assign and value.is_meta != own.is_meta:
        where = "the file is" if value.is_meta else "the module is"
        raise ValueError(f"{name}: {where} on the meta device; load_state_dict with assign=True")
