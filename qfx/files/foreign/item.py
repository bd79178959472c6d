"""Item: a tensor of a model of another tool, which is read when it is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from qfx.files.foreign.weight import ForeignGrid, ForeignWeight
from qfx.values.scheme import QSpec


class Item(NamedTuple):
    """A tensor of a model of another tool.

    `shape`, `dtype`: the shape and dtype of its float values, which `floats` reads. `each`: reads
    those of one expert after the other; None if these are not the weights of experts. `kind`: the
    name of its format in the file, '' for a plain tensor. `grid`: the format of its integers; None
    if it has none, or if qfx does not know their format. `weight` reads the integers; None without
    a `grid`. `x`: how the file quantizes activations, or how qfx does if the file does not say.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    floats: Callable[[], Tensor]
    kind: str = ""
    grid: ForeignGrid | None = None
    weight: Callable[[], ForeignWeight] | None = None
    x: QSpec | None = QSpec(symmetric=False)
    each: Callable[[], Iterator[Tensor]] | None = None

    def integers(self) -> ForeignWeight:
        """Reads the integers. Those of experts are the rows of one weight."""
        assert self.weight is not None
        return self.weight()

    def experts(self) -> Iterator[Tensor]:
        """Reads the float weights of one expert after the other."""
        assert self.each is not None
        return self.each()
