"""Counts the bytes of weights that one call reads, as they are stored and as they would be in
float."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from qfx.nn.weight_bytes import WeightBytes
from qfx.report.report_row import Row


class WeightsRead(NamedTuple):
    """`stored`: the bytes of the weights that a call reads, with their scales. `elements`: their
    number of elements. `floating`: the bytes of these elements in the dtype that most weights of
    the model have in float; None if a function was explained, whose weights are unknown."""

    stored: int
    elements: int
    floating: int | None

    @property
    def bits(self) -> float:
        """The stored bits of an element."""
        return 8 * self.stored / self.elements

    def __str__(self) -> str:
        text = f"weights: {self.stored / 1e6:.3g} MB read a call, {self.bits:.2f} bits an element"
        if self.floating in (None, self.stored):
            return text
        return f"{text}; {self.floating / 1e6:.3g} MB in float"


def weights_read(
    rows: Sequence[Row], weights: WeightBytes | None, beside: WeightBytes | None
) -> WeightsRead | None:
    """Returns the bytes of the weights of all matmuls; None if no weight is known. A weight counts
    as often as a call reads it; weights `beside` the rows count once."""
    known = [(row.weight_bytes, row.bits) for row in rows if row.weight_bytes and row.bits]
    others = sum(beside.multiplying.values()) if beside else 0
    stored = sum(size for size, _ in known) + others
    elements = sum(8 * size / bits for size, bits in known)
    elements += others / beside.item if beside else 0
    if not stored:
        return None
    floating = None if weights is None else round(elements * weights.item)
    return WeightsRead(stored, round(elements), floating)
