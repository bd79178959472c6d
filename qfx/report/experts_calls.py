"""Blocks of experts in reports: their function with dequantized weights, and the measurement of a
call."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qfx._C as _C
from qfx.cost.timing import medians
from qfx.nn.experts import Experts
from qfx.nn.stacked_weight import StackedWeight
from qfx.ops.experts import gated
from qfx.ops.single_tensors import sqnr
from qfx.report.report_row import Range, Row, SiteMeasurement, range_of

WeightOf = Callable[[StackedWeight, int], Tensor]


class ExpertsCall(NamedTuple):
    """A call of a block of int8 experts, and its measurement. `slots`: the number of pairs of a
    token and an expert."""

    name: str
    module: Experts
    slots: int
    seen: Range
    measured: SiteMeasurement

    @property
    def row(self) -> Row:
        """The row of the report, whose shape is that of both products of all slots."""
        parts = (self.module.up, self.module.down)
        stored = sum(part.packed.numel() for part in parts)
        elements = sum(part.experts * part.n * part.k for part in parts)
        return Row(
            self.name,
            "",
            ", ".join(f"{self.slots}x{part.k}x{part.n}" for part in parts),
            self.module.scheme,
            _C.isa(),
            f"an int8 module, qfx.nn.Experts, {self.module.num_experts} experts",
            **self.measured._asdict(),
            **self.seen._asdict(),
            measured=True,
            weight_bytes=stored,
            bits=8 * stored / max(elements, 1),
        )


def experts_call(
    name: str, module: Experts, reference: nn.Module | None, given: tuple[Any, ...]
) -> ExpertsCall:
    """Measures a call with these arguments: against `reference`, the block in float, or else
    against the block's own weights, dequantized, in float32."""
    x, expert, routing = given
    int8: Callable[[], Tensor] = partial(module.forward, *given)
    exact: Callable[[], Tensor] = partial(in_float, module, x.float(), expert, routing.float())
    timed: Callable[[], Tensor] = partial(in_float, module, x, expert, routing, _kept(x.dtype))
    if reference is not None:
        dtype = next(reference.parameters()).dtype
        exact = timed = partial(reference, x.to(dtype), expert, routing.to(dtype))
    timed()  # dequantizes what the times are without
    float_s, int8_s = medians(timed, int8, rounds=3)
    measured = SiteMeasurement(sqnr(exact().float(), int8().float()), float_s, int8_s)
    return ExpertsCall(name, module, expert.numel(), range_of(x), measured)


def _kept(dtype: torch.dtype) -> WeightOf:
    """Returns a function that dequantizes each weight once."""
    return cache(lambda part, e: part.dequantized(e).to(dtype))


def dequantized(part: StackedWeight, e: int) -> Tensor:
    """Returns the float32 weight [N, K] of an expert."""
    return part.dequantized(e)


def in_float(
    module: Experts, x: Tensor, expert: Tensor, routing: Tensor, weight_of: WeightOf = dequantized
) -> Tensor:
    """Computes the block with the weights that `weight_of` returns, in the dtype of x."""
    y = x.new_zeros(x.shape[0], module.down.n)

    def linear(part: StackedWeight, e: int, rows: Tensor) -> Tensor:
        bias = None if part.bias is None else part.bias[e].to(rows.dtype)
        return F.linear(rows, weight_of(part, e).to(rows.dtype), bias)

    for e in expert.unique().tolist():
        if e >= module.num_experts:
            continue
        tokens, slots = (expert == e).nonzero(as_tuple=True)
        h = gated(linear(module.up, e, x[tokens]), *module.gate)
        part = linear(module.down, e, h) * routing[tokens, slots, None].to(h.dtype)
        y.index_add_(0, tokens, part)
    return y
