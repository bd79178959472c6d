"""Inputs: what a runner is given, which has to be what it was built for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from qfx.programs.words import Region

_SHAPE = attrgetter("shape")


@dataclass(frozen=True)
class View:
    """A tensor in a region; strides and offset in elements."""

    region: Region
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Inputs:
    """Looks closer at what it did not see at the call before: the hundred tensors of a cache come
    again at each step."""

    def __init__(self, views: Sequence[View]) -> None:
        self.views = views
        self.regions = [view.region for view in views]
        self._known: list[Callable[[], Any]] = [_nobody] * len(views)  # weak references
        self._at = [0] * len(views)
        self._sizes = [view.sizes for view in views]

    def addresses(self, tensors: Sequence[Any]) -> dict[Region, int]:
        """TypeError or ValueError for what the runner was not built for."""
        if len(tensors) != len(self.views):
            raise TypeError(f"{len(tensors)} inputs, expected {len(self.views)}")
        known = [each() for each in self._known]
        new = [i for i, (t, same) in enumerate(zip(tensors, known, strict=True)) if t is not same]
        for i in new:
            _check(tensors[i], self.views[i])
        found = list(map(Tensor.data_ptr, tensors))
        for i in new:
            self._known[i], self._at[i] = weakref.ref(tensors[i]), found[i]
        sizes = list(map(_SHAPE, tensors))
        if found != self._at or sizes != self._sizes or not all(map(Tensor.is_contiguous, tensors)):
            for tensor, view in zip(tensors, self.views, strict=True):
                _check(tensor, view)
            self._at = found
        return dict(zip(self.regions, found, strict=True))


def _nobody() -> None:
    return None


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
