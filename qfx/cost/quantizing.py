"""Cost of passes over activations: what a kind of codes, or a rotation, takes more than another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qfx.cost.interpolation import random
from qfx.cost.timing import fastest
from qfx.ops.packing import Packing
from qfx.ops.weight import PANEL
from qfx.values.scheme import QSpec
from qfx.weights.cache import pack

WIDTHS = ((1024, 64), (256, 1024))  # rows and features that a pass is measured on
ops = torch.ops.qfx


class Sweep(NamedTuple):
    """Seconds of a pass over a matrix: for each row, and for each element."""

    row_s: float
    element_s: float

    def over(self, m: int, k: int) -> float:
        return m * (self.row_s + k * self.element_s)


def symmetric_saving(dtype: torch.dtype, m: int = 1024, k: int = 64) -> float:
    """Both kinds make the same pass over a row; a zero point costs a little more for each row."""
    x = random(m, k, dtype)
    asymmetric, symmetric = fastest(
        lambda: ops.quantize(x, [1], 8, False),
        lambda: ops.quantize(x, [1], 8, True),
    )
    return max(asymmetric - symmetric, 0.0) / m


def _dynamic(x: Tensor) -> Any:
    return ops.quantize(x, [1], 8, False)


def static_saving(dtype: torch.dtype) -> tuple[Sweep, float]:
    """Of a pass that need not find the range; and what a call costs, two operators for one."""
    scale = torch.tensor([0.02])

    def static(x: Tensor) -> Any:
        return ops.quantize_static(x, scale, None, 8, True)

    w, x, how = random(PANEL, 64, dtype), random(1, 64, dtype), (None, "none", dtype)
    packed = pack(w, (), Packing(QSpec())).tensors
    one, two = fastest(
        lambda: ops.int8_linear_dynamic(x, *packed, None, [1], 8, False, "none", dtype),
        lambda: ops.int8_linear(*static(x), *packed, *how),
    )
    return measured_pass(_dynamic, dtype, less=static), two - one


def rotation(dtype: torch.dtype) -> Sweep:
    """What rotated blocks of 64 add to the pass that quantizes."""
    return measured_pass(lambda x: ops.quantize(x, [1], 8, False, None, 64), dtype, less=_dynamic)


def measured_pass(
    call: Callable[[Tensor], Any],
    dtype: torch.dtype,
    less: Callable[[Tensor], Any] = lambda x: None,
) -> Sweep:
    """What a call takes more than another, from narrow rows and from wide ones."""
    per_row = []
    for m, k in WIDTHS:
        x = random(m, k, dtype)
        some, more = fastest(partial(less, x), partial(call, x))
        per_row.append(max(more - some, 0.0) / m)
    (_, narrow), (_, wide) = WIDTHS
    element = max(per_row[1] - per_row[0], 0.0) / (wide - narrow)
    return Sweep(max(per_row[0] - narrow * element, 0.0), element)


def turn(dtype: torch.dtype) -> Sweep:
    """Rotating by itself."""
    return measured_pass(lambda x: ops.rotate(x, None, 64), dtype)
