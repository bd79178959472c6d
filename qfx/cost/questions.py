"""The questions of autotuning: the choices between settings of parameters for the kernels of an
instruction set, and the matmuls (loads) that are timed for each choice.

Except in `serial_steps`, half of the loads have weights that come from memory, and half have
weights in the second-level cache: a hint that gains on the former may lose on the latter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from qfx.cost.autotune import ALL, Answer, Question, Round, Schedule
from qfx.cost.prefetch import KERNELS, STREAMS, tried_for

FAR, NEAR = (1024, 512), (512, 256)  # K and N of weights in memory and in the second-level cache
CALLS = 8  # in a row, for weights in the second-level cache
FEW = (1, 2, 3, 4, 6, 8, 12, 16, 32)  # rows
SHARED = (512, 512)  # K and N of products that threads share
DURATIONS = (4e-6, 2e-5, 1e-4, 7e-4)  # seconds of these products on one thread
MOST_ROWS = 4096  # of a product that is timed
NO_ROWS, NO_STEPS = 1 << 20, 1 << 40  # a threshold that is never reached
SAMPLES = 3  # of each way in a round; the least counts
CLOSE = 0.03  # times that differ by a smaller fraction are equally fast
ALONE = Schedule((Round(ALL, SAMPLES),) * 4, min, CLOSE, enough=CLOSE)
TOGETHER = replace(ALONE, rounds=(Round(ALL, 2),) * 4, together=True)  # these take long
Parameters = Mapping[str, int | str]  # of a format, by name
Tunings = Mapping[str, Parameters]  # of each format


class Load(NamedTuple):
    """An int8 matmul [rows, k] x [k, n] to be timed. `calls`: 0 if the weight comes from memory,
    else the number of calls in a row."""

    rows: int
    k: int
    n: int
    calls: int

    @property
    def steps(self) -> int:
        """The number of multiply-accumulates."""
        return self.rows * self.k * self.n


class Way(NamedTuple):
    """A way to run a load: with the kernels of an operand format, set to these parameters."""

    format: str
    parameters: Parameters


AnyQuestion = Question[Way, Load, Parameters]


class Format(NamedTuple):
    """An operand format. `few_rows`, `pair_rows`: the numbers of rows up to which the parameters
    `hint` and `streams` apply. `below`: the name of the format that is used for fewer rows, or ''.
    `speed`: multiply-accumulates per second."""

    name: str
    few_rows: int
    pair_rows: int
    below: str
    speed: float


def hint(format: Format, tunings: Tunings, threads: int) -> AnyQuestion | None:
    """Returns the question of `hint` and `ahead`: into which caches weights are prefetched, and how
    many bytes ahead of their use. Returns None for a format without `few_rows`. The hint nta is not
    tried if the format is for several rows, where it acts like t0."""
    rows, no_hint = ([4], "nta") if format.below else ([1], "")
    tried = [way for way in tried_for(KERNELS) if way.hint != no_hint]
    options: list[Parameters] = [{"hint": way.hint, "ahead": way.ahead} for way in tried]
    return _alternatives(format, tunings, options, rows) if format.few_rows else None


def streams(format: Format, tunings: Tunings, threads: int) -> AnyQuestion | None:
    """Returns the question of `streams`: how many panels are read side by side. Returns None for a
    format whose `pair_rows` are fewer than 4."""
    options: list[Parameters] = [{"streams": count} for count in STREAMS]
    rows = (4, format.pair_rows) if format.below else (2, 4)
    return _alternatives(format, tunings, options, rows) if format.pair_rows >= 4 else None


def stream_rows(format: Format, tunings: Tunings, threads: int) -> AnyQuestion | None:
    """Returns the question of `stream_rows`: up to how many rows the weights are streamed (read
    once from memory). Returns None for a format without `few_rows`."""
    rows = [m for m in FEW if m <= 2 * format.few_rows and m != 3]
    now = tunings[format.name]
    ways = [_alone(format.name, {**now, "stream_rows": most}) for most in (64, 0)]
    at = lambda load, most: load.rows > most  # noqa: E731
    return _cut("stream_rows", now, rows, _loads(rows), ways, at) if rows else None


def minimum_rows(format: Format, tunings: Tunings, threads: int) -> AnyQuestion | None:
    """Returns the question of `minimum_rows`: from how many rows on the format is used instead of
    the one for fewer rows. Returns None if there is no format for fewer rows."""
    if not format.below:
        return None
    ways = [_alone(name, tunings[name]) for name in (format.below, format.name)]
    at = lambda load, least: load.rows >= least  # noqa: E731
    values, now = [*FEW[:-1], NO_ROWS], tunings[format.name]
    return _cut("minimum_rows", now, values, _loads(FEW[:-1]), ways, at)


def serial_steps(format: Format, tunings: Tunings, threads: int) -> AnyQuestion | None:
    """Returns the question of `serial_steps`: from how many multiply-accumulates on a matmul wakes
    other threads, if they help at all. Returns None if there is one thread."""
    if threads == 1:
        return None
    now = tunings[format.name]
    ways = [Way(format.name, {**now, "serial_steps": steps}) for steps in (NO_STEPS, 0)]
    loads = [_lasting(seconds, format) for seconds in DURATIONS]
    between = [math.isqrt(a.steps * b.steps) for a, b in pairwise(loads)]
    values = [loads[0].steps, *between, NO_STEPS]
    at = lambda load, serial: load.steps >= serial  # noqa: E731
    return replace(_cut("serial_steps", now, values, loads, ways, at), schedule=TOGETHER)


def _lasting(seconds: float, format: Format) -> Load:
    """Returns a matmul that takes about `seconds` on one thread. The longest duration gets `calls`
    0, so it is not repeated: a second run would add no information."""
    rows = round(seconds * format.speed / math.prod(SHARED))
    return Load(min(max(rows, 1), MOST_ROWS), *SHARED, int(seconds < DURATIONS[-1]))


QUESTIONS = (hint, streams, stream_rows, minimum_rows, serial_steps)  # each serves the next


def _alone(format: str, parameters: Parameters) -> Way:
    """Returns a way of running loads on one thread, whose processor time can be measured."""
    return Way(format, {**parameters, "serial_steps": NO_STEPS})


def _loads(rows: Sequence[int]) -> list[Load]:
    return [Load(m, *size, calls) for size, calls in ((FAR, 0), (NEAR, CALLS)) for m in rows]


def _alternatives(
    format: Format, tunings: Tunings, options: Sequence[Parameters], rows: Sequence[int]
) -> AnyQuestion:
    """Returns the question which of the `options` is best. Each option sets some parameters, and is
    timed on all loads."""
    now, loads = tunings[format.name], _loads(rows)
    others = [option for option in options if {**now, **option} != now]
    ways = [_alone(format.name, {**now, **option}) for option in ({}, *others)]
    answers = [Answer(option, (i,) * len(loads)) for i, option in enumerate(({}, *others))]
    return Question(loads, ways, answers, ALONE)


def _cut(
    name: str,
    now: Parameters,
    values: Sequence[int],
    loads: Sequence[Load],
    ways: Sequence[Way],
    second: Callable[[Load, int], bool],
) -> AnyQuestion:
    """Returns the question which of the `values` is best for the parameter `name`, a threshold.
    Loads for which `second(load, value)` is true run in the second of the two `ways`, the others in
    the first."""

    def ways_for(value: int) -> tuple[int, ...]:
        return tuple(int(second(load, value)) for load in loads)

    given: list[Parameters] = [{name: value} for value in values]
    others = [Answer(each, ways_for(value)) for each, value in zip(given, values, strict=True)]
    return Question(loads, ways, [Answer({}, ways_for(int(now[name]))), *others], ALONE)
