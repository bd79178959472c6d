"""`KernelParameters`: the parameters of all operand formats of an instruction set, chosen on one
machine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from qfx.cost.autotune import UNKNOWN, Machine, choose
from qfx.cost.grid import seconds as number
from qfx.cost.questions import CLOSE, QUESTIONS, Format, Load, Parameters, Tunings, Way


@dataclass(frozen=True)
class KernelParameters:
    """The chosen parameters. `formats`: the parameters of each operand format. `spreads`: for each
    format, the largest `spread` of its choices (`qfx.cost.autotune.Choice`)."""

    formats: Mapping[str, Parameters]
    spreads: Mapping[str, float]

    @property
    def spread(self) -> float:
        return max(self.spreads.values())

    @property
    def settled(self) -> bool:
        return self.spread <= CLOSE

    @classmethod
    def of(cls, raw: Any, names: Sequence[str]) -> KernelParameters:
        """Returns the parameters in parsed JSON, for formats of these names. Raises ValueError,
        KeyError or TypeError for anything else; the kernels check whether the parameters are
        legal."""
        if [*raw["formats"]] != [*names]:
            raise ValueError(f"the kept parameters are not of the formats {', '.join(names)}")
        spreads = {name: number(raw["spreads"][name], most=UNKNOWN) for name in names}
        return cls({name: dict(raw["formats"][name]) for name in names}, spreads)

    def text(self) -> str:
        """Returns the JSON that `of` reads."""
        return json.dumps(asdict(self))


def answer_questions(
    formats: Sequence[Format], start: Tunings, threads: int, machine: Machine[Way, Load]
) -> KernelParameters:
    """Chooses the parameters of all formats by timing with `machine`, beginning with the parameters
    `start`. Parameters that could not be timed stay as they are, with the spread UNKNOWN."""
    found, spreads = dict(start), dict.fromkeys(start, 0.0)
    for ask in QUESTIONS:
        for format in formats:
            if question := ask(format, found, threads):
                choice, name = choose(question, machine), format.name
                found[name] = {**found[name], **choice.parameters}
                spreads[name] = min(max(spreads[name], choice.spread), UNKNOWN)
    return KernelParameters(found, spreads)
