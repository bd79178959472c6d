"""Inputs of a runner, and the check that they are what the runner was built for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qfx.programs.memory import Region


@dataclass(frozen=True)
class View:
    """The place of a tensor in a memory region; strides and offset in elements."""

    region: Region
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Bound:
    """Tensors that are passed to many calls, for example those of a cache. Their owner makes a new
    Bound when one of them, or its memory, changes. They are checked once for each runner that
    receives them."""

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        self.tensors = tuple(tensors)
        self.addresses: dict[Region, int] = {}  # for all runners that have checked them


NOTHING = Bound()


def addresses_of(tensors: Sequence[Any], bound: Bound, views: Sequence[View]) -> dict[Region, int]:
    """Returns the address of the memory region of each input in `tensors`, and checks the inputs in
    `bound`, which follow them. Raises TypeError or ValueError for a tensor that does not have the
    dtype, shape and layout of its view."""
    count = len(tensors) + len(bound.tensors)
    if count != len(views):
        raise TypeError(f"{count} inputs, expected {len(views)}")
    if bound.tensors and views[-1].region not in bound.addresses:
        bound.addresses |= _looked_at(bound.tensors, views[len(tensors) :])
    return _looked_at(tensors, views)


def _looked_at(tensors: Sequence[Any], views: Sequence[View]) -> dict[Region, int]:
    found = {}
    for tensor, view in zip(tensors, views, strict=False):
        _check(tensor, view)
        found[view.region] = tensor.data_ptr()
    return found


def _check(tensor: Any, expected: View) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"an input is a {type(tensor).__name__}, expected a tensor")
    if tensor.shape != expected.sizes or tensor.dtype != expected.dtype:
        raise ValueError(
            f"an input is {tensor.dtype} {tuple(tensor.shape)}, expected {expected.dtype} "
            f"{expected.sizes}, for which the program was built"
        )
    if not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_neg():
        raise ValueError(
            f"an input is on {tensor.device} with strides {tensor.stride()}, expected it in the "
            "memory of the CPU, contiguous"
        )
