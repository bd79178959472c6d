"""Streaming: how the weights of few rows pass by, chosen by timing the steps that a model makes.

What is right differs between processors, and between weights that lie in their caches and such that
come from memory. The steps themselves are the best load to measure, and no choice changes a bit of
their results: so the first steps are each run in another way, until one of them has shown to be the
fastest.
"""

from __future__ import annotations

import time
from statistics import median
from typing import NamedTuple

import torch

from qfx._C import Program

FEW_ROWS = 16  # which take about as long as the weights need to pass by
CLOSE = 0.02  # a part of the time; what differs by less is equally fast


class Way(NamedTuple):
    """As `Program.stream` takes it; a hint of '' for what is set for the kernels."""

    hint: str
    ahead: int = 0
    streams: int = 1


DEFAULT = Way("")
WAYS = (
    DEFAULT,
    *(Way("t1", ahead, streams) for streams in (1, 2) for ahead in (1024, 4096)),
    Way("t0", 1024),
    Way("t0", 4096),
    *(Way("nta", 4096, streams) for streams in (1, 2)),
    Way("nta", 16384),
)
ROUNDS = ((10, 3), (5, 4), (2, 8))  # so many of the ways are run so often each


class Choice:
    """Which way to run the next step, and what it took."""

    def __init__(self) -> None:
        self.left = list(WAYS)
        self._seconds: dict[Way, list[float]] = {way: [] for way in WAYS}
        self._round, self._turn = 0, 0

    @property
    def settled(self) -> bool:
        return self._round == len(ROUNDS)

    @property
    def next(self) -> Way:
        return self.left[0] if self.settled else self.left[self._turn % len(self.left)]

    def took(self, seconds: float) -> None:
        """A step in the way that was next."""
        if self.settled:
            return
        self._seconds[self.next].append(seconds)
        self._turn += 1
        if self._turn < len(self.left) * ROUNDS[self._round][1]:
            return
        self._round, self._turn = self._round + 1, 0
        if self.settled:
            self.left = [self._best()]
        else:
            self.left.sort(key=self._cost)
            del self.left[ROUNDS[self._round][0] :]

    def _cost(self, way: Way) -> float:
        """Of steps that something else held up too."""
        return median(sorted(self._seconds[way])[: len(self._seconds[way]) // 2 + 1])

    def _best(self) -> Way:
        """The default where none is clearly faster."""
        best = min(self.left, key=self._cost)
        return DEFAULT if self._cost(DEFAULT) <= (1 + CLOSE) * self._cost(best) else best


class Streaming:
    """Runs a program; with each number of threads it makes a choice of its own."""

    def __init__(self, program: Program) -> None:
        self.program, self.way = program, DEFAULT
        self.choices: dict[int, Choice] = {}
        most_rows = max((rows for _, _, rows in program.weights), default=0)
        self._chooses = 0 < most_rows <= FEW_ROWS

    def run(self, *given: list[int]) -> None:
        """As `Program.run` takes it."""
        if not self._chooses:
            self.program.run(*given)
            return
        choice = self.choices.setdefault(torch.get_num_threads(), Choice())
        if choice.next != self.way:
            self.way = choice.next
            self.program.stream(*self.way)
        start = time.perf_counter()
        self.program.run(*given)
        choice.took(time.perf_counter() - start)
