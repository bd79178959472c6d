"""Chooses the parameters of kernels once on this machine; they are stored with the cost tables.

The parameters do not change a bit of any result. The first compilation of a process sets them;
parameters that were set by hand stay. If no compilation has run, for example in a package without
Python, the defaults of the family of processors apply.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from tabulate import tabulate

import qfx._C as _C
from qfx.cost import disk
from qfx.cost.kernel_parameters import KernelParameters, answer_questions
from qfx.cost.questions import (
    CLOSE,
    FAR,
    FEW,
    MOST_ROWS,
    NEAR,
    NO_STEPS,
    SAMPLES,
    SHARED,
    Format,
    Load,
    Parameters,
    Way,
)

WEIGHTS = 24  # used in turn, 12 MB: more pages than a processor's TLB holds
LIMIT = 0.08  # seconds after which no further round begins
PROBE = 5e-4  # seconds for which all threads work, to see whether each has a core
ENOUGH = 0.8  # of a core for each thread; waking them takes some of it
DEFAULT, BY_HAND = "default of the processor's family", "set by hand"
_SET: dict[frozenset[tuple[str, int | str]], str] = {}  # parameters set by qfx -> their origin


@dataclass(frozen=True)
class KernelFormat:
    """An operand format with its parameters, which docs/kernels.md describes. `origin`: a text that
    says whether they are defaults, measured or set by hand."""

    isa: str
    name: str
    parameters: Parameters
    origin: str


@dataclass(frozen=True)
class Kernels:
    """The operand formats of an instruction set, as `qfx.kernels` returns them. Prints as a
    table."""

    formats: tuple[KernelFormat, ...]

    def __str__(self) -> str:
        rows = [
            {"isa": f.isa, "format": f.name, **f.parameters, "": f.origin} for f in self.formats
        ]
        return tabulate(rows, headers="keys", disable_numparse=True)


def kernels() -> Kernels:
    """Returns the operand formats of the instruction set in use, each with the parameters that its
    kernels use now.

        print(qfx.kernels())

    Until the first compilation the parameters are defaults. That compilation measures them, in a
    tenth of a second, or reads what an earlier process has measured.
    """
    isa = _C.isa()
    found = _C.tuning(isa).items()
    return Kernels(tuple(KernelFormat(isa, name, p, _origin(isa, name, p)) for name, p in found))


def tune_kernels() -> None:
    """Sets the kernel parameters that were chosen for this instruction set and number of
    threads."""
    isa = _C.isa()
    if isa == "ref":  # its tiles do not prefetch
        return
    chosen = _chosen(isa, torch.get_num_threads())
    in_use = _C.tuning(isa)
    for name, parameters in chosen.formats.items():
        if _origin(isa, name, in_use[name]) != BY_HAND:
            _C.set_tuning(isa, {name: dict(parameters)})
            _SET[frozenset(parameters.items())] = _words(chosen.spreads[name])


def _words(spread: float) -> str:
    return f"measured here, {'' if spread <= CLOSE else 'not settled: '}spread {spread:.1%}"


def _origin(isa: str, name: str, parameters: Parameters) -> str:
    """Returns a text that says whether parameters are defaults, measured or set by hand. Two
    instruction sets may share a format, so this is decided by the values that qfx has set."""
    default = parameters == _C.default_tuning(isa)[name]
    return _SET.get(frozenset(parameters.items()), DEFAULT if default else BY_HAND)


@lru_cache
def _chosen(isa: str, threads: int) -> KernelParameters:
    """Returns the parameters from the cache directory, or measures them and stores them there."""
    return kept(isa, threads, lambda: measured(isa, threads))


def kept(isa: str, threads: int, measure: Callable[[], KernelParameters]) -> KernelParameters:
    """Returns the parameters stored for an instruction set and a number of threads. If there are
    none, measures and stores them."""

    def read(text: str) -> KernelParameters:
        defaults = _C.default_tuning(isa)
        found = KernelParameters.of(json.loads(text), [*defaults])
        if any(found.formats[name].keys() != defaults[name].keys() for name in defaults):
            raise ValueError("the kept parameters are not all that a format has")
        _C.check_tuning(isa, {name: dict(given) for name, given in found.formats.items()})
        return found

    return disk.read_or_measure("kernels", (torch.int8, threads, isa), read, measure)


def measured(isa: str, threads: int) -> KernelParameters:
    """Chooses the parameters by timing matmuls. `threads` is torch's number of threads."""
    machine = ThisMachine(isa)
    formats = [Format(speed=machine.speed(f["name"]), **f) for f in _C.choices(isa)]
    return answer_questions(formats, _C.default_tuning(isa), threads, machine)


class ThisMachine:
    """A timer of matmuls on an instruction set. No round begins after LIMIT seconds."""

    def __init__(self, isa: str) -> None:
        self.isa, self.end = isa, time.perf_counter() + LIMIT
        self.products = {
            FAR: _C.TimedProduct(FEW[-1], *FAR, WEIGHTS),
            NEAR: _C.TimedProduct(FEW[-1], *NEAR, 1),
            SHARED: _C.TimedProduct(MOST_ROWS, *SHARED, 1),
        }

    def seconds(self, way: Way, load: Load) -> float:
        timed = self.products[load.k, load.n].seconds
        return timed(self.isa, way.format, dict(way.parameters), load.rows, load.calls)

    def speed(self, format: str) -> float:
        """Returns the multiply-accumulates per second of an operand format, for many rows on one
        thread."""
        load = Load(64, *SHARED, 1)
        alone = Way(format, {"serial_steps": NO_STEPS})
        return load.steps / min(self.seconds(alone, load) for _ in range(SAMPLES))

    def in_time(self) -> bool:
        return time.perf_counter() < self.end

    def has_free_cores(self) -> bool:
        return _C.share_of_cores(PROBE) > ENOUGH
