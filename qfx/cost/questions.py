"""Questions: which parameters of the formats of an instruction set are chosen, and by what loads.

But for those of threads, half of the loads have weights that come from memory, half such that lie
in the second cache: a hint that gains on the former may lose on the latter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, product
from typing import NamedTuple

from qfx.cost.choosing import Answer, Load, Parameters, Question, Way

FAR, NEAR = (1024, 512), (512, 256)  # K and N of weights in memory and in the second cache
CALLS = 8  # in a row, of weights in the second cache
HINTS = ("t0", "t1", "nta")
AHEAD = (2048, 4096, 8192)  # with 1024, weights of 16 MB take a fifth longer on 256 bits
FEW = (1, 2, 3, 4, 6, 8, 12, 16, 32)  # rows
SHARED = (512, 512)  # K and N of products that threads share
DURATIONS = (4e-6, 2e-5, 1e-4, 7e-4)  # seconds of those on one thread
MOST_ROWS = 4096  # of a product that is timed
NO_ROWS, NO_STEPS = 1 << 20, 1 << 40  # that a format or another thread is used for: never
Tunings = Mapping[str, Parameters]  # of each format


class Format(NamedTuple):
    """What of a format there is to choose: up to how many rows `hint` and `streams` count, and the
    format that may take fewer rows, or ''. `speed`: multiply-accumulates in a second."""

    name: str
    few_rows: int
    pair_rows: int
    below: str
    speed: float


def hint(format: Format, tunings: Tunings, threads: int) -> Question | None:
    """Into which caches weights are fetched, and how early. Several rows take nta for t0."""
    rows, hints = ([4], HINTS[:2]) if format.below else ([1], HINTS)
    options: list[Parameters] = [{"hint": h, "ahead": ahead} for h, ahead in product(hints, AHEAD)]
    return _alternatives(format, tunings, options, rows) if format.few_rows else None


def streams(format: Format, tunings: Tunings, threads: int) -> Question | None:
    """How many panels side by side."""
    options: list[Parameters] = [{"streams": 1}, {"streams": 2}]
    rows = (4, format.pair_rows) if format.below else (2, 4)
    return _alternatives(format, tunings, options, rows) if format.pair_rows >= 4 else None


def stream_rows(format: Format, tunings: Tunings, threads: int) -> Question | None:
    """Up to how many rows the weights pass by once."""
    rows = [m for m in FEW if m <= 2 * format.few_rows and m != 3]
    now = tunings[format.name]
    ways = [_alone(format.name, {**now, "stream_rows": most}) for most in (64, 0)]
    at = lambda load, most: load.rows > most  # noqa: E731
    return _cut("stream_rows", now, rows, _loads(rows), ways, at) if rows else None


def minimum_rows(format: Format, tunings: Tunings, threads: int) -> Question | None:
    """From how many rows on the format is used, and not the one below."""
    if not format.below:
        return None
    ways = [_alone(name, tunings[name]) for name in (format.below, format.name)]
    at = lambda load, least: load.rows >= least  # noqa: E731
    values, now = [*FEW[:-1], NO_ROWS], tunings[format.name]
    return _cut("minimum_rows", now, values, _loads(FEW[:-1]), ways, at)


def serial_steps(format: Format, tunings: Tunings, threads: int) -> Question | None:
    """From how many steps on other threads are woken, if they gain at all."""
    if threads == 1:
        return None
    now = tunings[format.name]
    ways = [Way(format.name, {**now, "serial_steps": steps}) for steps in (NO_STEPS, 0)]
    loads = [_lasting(seconds, format) for seconds in DURATIONS]
    between = [math.isqrt(a.steps * b.steps) for a, b in pairwise(loads)]
    values = [loads[0].steps, *between, NO_STEPS]
    at = lambda load, serial: load.steps >= serial  # noqa: E731
    return _cut("serial_steps", now, values, loads, ways, at)._replace(together=True)


def _lasting(seconds: float, format: Format) -> Load:
    """About so long on one thread; to run a long one twice would tell nothing more."""
    rows = round(seconds * format.speed / math.prod(SHARED))
    return Load(min(max(rows, 1), MOST_ROWS), *SHARED, int(seconds < DURATIONS[-1]))


QUESTIONS = (hint, streams, stream_rows, minimum_rows, serial_steps)  # each serves the next


def _alone(format: str, parameters: Parameters) -> Way:
    """On one thread, whose own clock can be read."""
    return Way(format, {**parameters, "serial_steps": NO_STEPS})


def _loads(rows: Sequence[int]) -> list[Load]:
    return [Load(m, *size, calls) for size, calls in ((FAR, 0), (NEAR, CALLS)) for m in rows]


def _alternatives(
    format: Format, tunings: Tunings, options: Sequence[Parameters], rows: Sequence[int]
) -> Question:
    """Each option on all loads."""
    now, loads = tunings[format.name], _loads(rows)
    others = [option for option in options if {**now, **option} != now]
    ways = [_alone(format.name, {**now, **option}) for option in ({}, *others)]
    answers = [Answer(option, (i,) * len(loads)) for i, option in enumerate(({}, *others))]
    return Question(loads, ways, answers)


def _cut(
    name: str,
    now: Parameters,
    values: Sequence[int],
    loads: Sequence[Load],
    ways: Sequence[Way],
    second: Callable[[Load, int], bool],
) -> Question:
    """A parameter that says which loads are run by the second of two ways."""

    def ways_for(value: int) -> tuple[int, ...]:
        return tuple(int(second(load, value)) for load in loads)

    others = [Answer({name: value}, ways_for(value)) for value in values]
    return Question(loads, ways, [Answer({}, ways_for(int(now[name]))), *others])
