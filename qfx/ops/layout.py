"""Layout: the properties of a packed weight as five integers, the form in which operators take
them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from qfx.values.scheme import QSpec


class Layout(NamedTuple):
    """The properties of a packed weight. `n`: rows, which in a graph may be a node. `bits`: bits in
    which a code is stored, 8 or fewer. `group`: elements of K whose products are summed separately,
    0 for all of K. `scale_group`: elements of K that share a scale of the weight: the group, or 0
    for all. `shift`: 1 if the weight has zero points or minimums, else 0."""

    n: Any
    bits: int = 8
    group: int = 0
    scale_group: int = 0
    shift: int = 0

    @property
    def one_scale(self) -> bool:
        """Whether each row has int8 codes with one scale and no zero point, so that its product
        with the codes of an activation is one exact integer matmul. (E1)"""
        return self[1:] == (8, 0, 0, 0)

    @property
    def low_bit(self) -> bool:
        """Whether codes are stored in fewer than 8 bits."""
        return self.bits != 8

    def scales(self, k: Any) -> Any:
        """Returns the number of scales of a row of k elements."""
        return -(-k // self.scale_group) if self.scale_group else 1


def each_layout(numbers: Sequence[Any]) -> list[Layout]:
    """Returns the layouts of several weights from their concatenated numbers, as `linears` takes
    them."""
    count = len(Layout._fields)
    return [Layout(*numbers[i : i + count]) for i in range(0, len(numbers), count)]


def layout_of(spec: QSpec, group: int, n: Any) -> list[Any]:
    """Returns the `Layout` of a weight with n rows that is quantized by `spec`, as a list. `group`:
    `Scheme.group`."""
    bits = spec.bits if spec.packed else 8
    return list(Layout(n, bits, group or spec.group, spec.group, int(not spec.symmetric)))
