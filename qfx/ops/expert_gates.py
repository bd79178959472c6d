"""Gates of experts: the values that `experts` takes for what lies between two products, found by
trying a function on values. See docs/numerics.md (X2)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from qfx.graph.activations import ACTIVATIONS
from qfx.ops.experts import gated

_TRIED = 1024  # values of each magnitude at least
_ORDERS = ("halves", "interleaved")


class ExpertGate(NamedTuple):
    """The values between the two products of an expert: arguments of `experts`. (X2)"""

    activation: str
    gate: str
    limit: float = 0.0
    shift: float = 0.0


def gate_like(
    between: Callable[[Tensor], Tensor], has_gate: bool, limits: Iterable[float], width: int = 16
) -> ExpertGate | None:
    """Returns the gate that computes what `between` computes of outputs [R, width] of a first
    product, float64 on the CPU; None if no arguments of `experts` do. `limits`: those that it may
    have besides none."""
    u = _values(width)
    wanted = between(u)
    for found in _candidates(has_gate, [limit for limit in limits if limit > 0]):
        made = gated(u, *found)
        if made.shape == wanted.shape and torch.allclose(made, wanted, rtol=1e-5, atol=1e-6):
            return found
    return None


def _values(width: int) -> Tensor:
    """Returns values [R, width] of many magnitudes and of both signs."""
    rows = -(-_TRIED // width)
    places = torch.arange(rows * width, dtype=torch.float64, device="cpu")
    some = torch.sin(places * places + 1).reshape(rows, width)
    return torch.cat([20 * some, 2000 * some])


def _candidates(has_gate: bool, limits: list[float]) -> Iterator[ExpertGate]:
    activations = [name for name in ACTIVATIONS if name != "none"]
    if not has_gate:
        yield from (ExpertGate(name, "none") for name in activations)
        return
    for each in itertools.product(activations, _ORDERS, (0.0, *limits), (0.0, 1.0)):
        yield ExpertGate(*each)
