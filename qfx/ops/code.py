"""Code: the quantization of an activation as five integers, the form in which operators take it."""

from __future__ import annotations

from typing import NamedTuple

from qfx.values.scheme import PER_TENSOR, QSpec


class Code(NamedTuple):
    """The quantization of an activation. `symmetric` and `per_tensor` are 0 or 1; per_tensor: one
    scale for all rows. `group`: elements of K that share a scale, 0 for all. `rotation`: the size
    of the blocks in which K is rotated before quantization, 0 for none. (R1)"""

    bits: int = 8
    symmetric: int = 1
    per_tensor: int = 0
    group: int = 0
    rotation: int = 0


def code_of(spec: QSpec, rotation: int = 0) -> list[int]:
    """Returns the `Code` of an activation that is quantized by `spec` after a rotation, as a
    list."""
    per_tensor = int(spec.axes == PER_TENSOR and not spec.group)
    return list(Code(spec.bits, int(spec.symmetric), per_tensor, spec.group, rotation))
