"""Linears that quantize the same floats in the same way become one instruction, at the place of the
first: rows are quantized once, and the panels of all weights shared out among the threads at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qfx.programs.emitting import Step
from qfx.programs.words import OPERATIONS, Instruction, Kind, Operand, Region

_LINEAR = OPERATIONS.index("linear")
_KNOWN = (Kind.CONSTANT, Kind.NUMBER)


def joined(steps: Sequence[Step], written: Iterable[Region]) -> list[Step]:
    """`written`: regions that some node writes to; what reads these stays where it is, and what
    reads an input where one is written to: two may share their memory."""
    changing = set(written)
    if any(region.kind is Kind.GIVEN for region in changing):
        every = (r for step in steps for r in step.regions)
        changing.update(r for r in every if r.kind is Kind.GIVEN)
    found: list[Step] = []
    firsts: dict[Instruction, Step] = {}
    for step in steps:
        if step.instructions is None:
            firsts = {}  # PyTorch runs something in between
        quantized, outcomes = _parts(step)
        first = firsts.get(quantized)
        if quantized and first is not None and _can_be_earlier(outcomes, changing):
            _append(first, outcomes)
            first.regions += step.regions
            continue
        if quantized and not any(r in changing for r in _regions(quantized)):
            firsts[quantized] = step
        found.append(step)
    return found


def _parts(step: Step) -> tuple[Instruction, Instruction]:
    """The operation and what it quantizes; the outcome of each weight. () where it is no linear."""
    if step.instructions is None or len(step.instructions) != 1:
        return (), ()
    (instruction,) = step.instructions
    if instruction[0] != _LINEAR:
        return (), ()
    count = _place_of_count(instruction)
    return instruction[:count], instruction[count + 1 :]


def _place_of_count(instruction: Instruction) -> int:
    """Operation, x, whether there is a factor, it; bits, symmetric, per tensor, group, rotation."""
    return 8 + int(instruction[2])  # type: ignore[arg-type]


def _append(first: Step, outcomes: Instruction) -> None:
    assert first.instructions is not None
    (instruction,) = first.instructions
    place = _place_of_count(instruction)
    more = int(instruction[place]) + 1  # type: ignore[arg-type]
    first.instructions = [(*instruction[:place], more, *instruction[place + 1 :], *outcomes)]


def _can_be_earlier(outcomes: Instruction, changing: set[Region]) -> bool:
    """All but its output, which comes first, was known when the program was made."""
    read = _regions(outcomes[1:])
    return all(r.kind in _KNOWN and r not in changing for r in read)


def _regions(parts: Instruction) -> list[Region]:
    return [part.region for part in parts if isinstance(part, Operand)]
