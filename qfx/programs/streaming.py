"""Streaming: chooses how a program for a few tokens prefetches its weights, by timing the steps of
a model.

The best choice differs between processors, and between weights that fit into a cache and weights
that come from memory. The steps themselves are the best load to measure, and no choice changes a
bit of their results. So each of the first steps is run with one of the candidates and timed for a
`Tuner` (qfx/cost/autotune.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch

from qfx._C import Program
from qfx.cost.autotune import Always, Answer, Question, Round, Schedule, Tuner
from qfx.cost.prefetch import PROGRAMS, Prefetch, tried_for

FEW_ROWS = 16  # up to this many rows take about as long as streaming the weights
DEFAULT = Prefetch("")
WAYS = (DEFAULT, *tried_for(PROGRAMS))


def _undisturbed(seconds: Sequence[float]) -> float:
    """Returns the median of the lower half: steps become longer as their context grows, and other
    processes delay some of them."""
    return median(sorted(seconds)[: len(seconds) // 2 + 1])


SCHEDULE = Schedule(
    rounds=(Round(len(WAYS), 3), Round(5, 4), Round(2, 8)),
    cost=_undisturbed,
    close=0.02,
    enough=-1.0,  # never reached: all rounds are run
)
TRIALS = sum(answers * samples for answers, samples in SCHEDULE.rounds)  # the first steps
_ANSWERS = [Answer(way, (i,)) for i, way in enumerate(WAYS)]
QUESTION: Question[Prefetch, None, Prefetch] = Question([None], WAYS, _ANSWERS, SCHEDULE)


class Streaming:
    """A program that chooses how to prefetch its weights, separately for each number of threads."""

    def __init__(self, program: Program) -> None:
        self.program, self.way = program, DEFAULT
        self.tuners: dict[int, Tuner[Prefetch, None, Prefetch]] = {}
        most_rows = max((rows for _, _, rows in program.weights), default=0)
        self._chooses = 0 < most_rows <= FEW_ROWS

    def run(self, *given: list[int]) -> None:
        """Runs the program, with the arguments of `Program.run`."""
        if not self._chooses:
            self.program.run(*given)
            return
        threads = torch.get_num_threads()
        tuner = self.tuners.get(threads)
        if tuner is None:
            tuner = self.tuners[threads] = Tuner(QUESTION, Always())
        self._stream(next_way(tuner))
        start = time.perf_counter()
        self.program.run(*given)
        tuner.took(time.perf_counter() - start)

    def _stream(self, way: Prefetch) -> None:
        if way != self.way:
            self.way = way
            self.program.stream(*way)


def next_way(tuner: Tuner[Prefetch, None, Prefetch]) -> Prefetch:
    """Returns how the next step prefetches weights: in the way that the tuner wants to time, or in
    the way that it has chosen."""
    if tuner.choice is not None:
        return tuner.choice.parameters
    assert tuner.trial is not None
    return tuner.trial[0]
