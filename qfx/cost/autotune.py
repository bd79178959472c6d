"""Autotuning: chooses the fastest of several settings of parameters by timing them in rounds.

This module does not depend on clocks, kernels or programs. A `Tuner` says what to time next,
receives the seconds, and stores the choice; `choose` does this to the end.

Terms: a question is a choice between several settings of parameters, and an answer is one of these
settings. A load is a piece of work that is timed. A way is one manner of running loads; an answer
states for each load the way in which it runs. A trial is one load, run in one way and timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

UNKNOWN = 1.0  # the spread if no two rounds could be compared
ALL = 1 << 30  # answers of a round: all of them
_LEAST = 1e-9  # seconds
W = TypeVar("W")  # a way to run a load
L = TypeVar("L")  # a load
P = TypeVar("P")  # the parameters that an answer sets
W_in = TypeVar("W_in", contravariant=True)
L_in = TypeVar("L_in", contravariant=True)


class Round(NamedTuple):
    """One round of trials. Only the `answers` fastest answers take part. Each trial is run
    `samples` times."""

    answers: int
    samples: int


@dataclass(frozen=True)
class Schedule:
    """The rules by which trials are run. `cost` reduces the seconds of all runs of a trial to one
    number. `close`: answers count as equally fast if their times differ by a smaller fraction than
    this. `enough`: no further round runs once the spread of two rounds is at most this. `together`:
    several threads run, and each needs a core."""

    rounds: tuple[Round, ...]
    cost: Callable[[Sequence[float]], float]
    close: float
    enough: float
    together: bool = False


@dataclass(frozen=True)
class Answer(Generic[P]):
    """A setting of parameters to choose from. `ways`: for each load, the index of the way in which
    the load runs with this setting."""

    parameters: P
    ways: tuple[int, ...]


@dataclass(frozen=True)
class Question(Generic[W, L, P]):
    """A choice between several settings of parameters, the `answers`, that is made by timing
    `loads`. The first answer is the current setting. It stays unless another one is clearly
    faster."""

    loads: Sequence[L]
    ways: Sequence[W]
    answers: Sequence[Answer[P]]
    schedule: Schedule


@dataclass(frozen=True)
class Choice(Generic[P]):
    """The parameters that were chosen. `spread`: a measure of doubt, as a fraction: how much slower
    the fastest answer of one round was in another round than the fastest answer of that other
    round."""

    parameters: P
    spread: float


class Conditions(Protocol):
    """Conditions of the machine that a tuner checks between rounds."""

    def in_time(self) -> bool:
        """Whether another round may begin."""
        ...

    def has_free_cores(self) -> bool:
        """Whether each thread has a core now; if not, times of several threads are meaningless."""
        ...


class Machine(Conditions, Protocol[W_in, L_in]):
    """A timer: runs a load in a given way and returns its seconds."""

    def seconds(self, way: W_in, load: L_in) -> float: ...


class Always:
    """Conditions without limits: there is always time, and there are always free cores."""

    def in_time(self) -> bool:
        return True

    def has_free_cores(self) -> bool:
        return True


class Tuner(Generic[W, L, P]):
    """Makes one choice between settings of parameters. `trial`: the way and the load to time next;
    None once the choice is made. `choice`: the result, None until then."""

    def __init__(self, question: Question[W, L, P], conditions: Conditions) -> None:
        self.trial: tuple[W, L] | None = None
        self.choice: Choice[P] | None = None
        self._trials = _trials(question, conditions)
        self._go_on(None)

    def took(self, seconds: float) -> None:
        """Records the seconds of the current trial and moves on to the next one."""
        if self.trial is not None:
            self._go_on(max(seconds, _LEAST))

    def _go_on(self, seconds: float | None) -> None:
        try:
            self.trial = self._trials.send(seconds)
        except StopIteration as end:
            self.trial, self.choice = None, end.value


def choose(question: Question[W, L, P], machine: Machine[W, L]) -> Choice[P]:
    """Makes the choice that `question` describes and returns it. `machine`, which may be real or
    simulated, times every trial that the tuner requests."""
    tuner = Tuner(question, machine)
    while tuner.trial is not None:
        tuner.took(machine.seconds(*tuner.trial))
    assert tuner.choice is not None
    return tuner.choice


Times = Mapping[tuple[int, int], list[float]]  # seconds, by the indices of load and way


def _trials(
    question: Question[W, L, P], conditions: Conditions
) -> Generator[tuple[W, L], float | None, Choice[P]]:
    """Yields the trials of the rounds, receives their seconds, and returns the choice. Ends early
    if there is no more time, or if two rounds agree: the fastest answer of each is about as fast as
    any answer in the other round."""
    schedule, left, spread = question.schedule, [*range(len(question.answers))], UNKNOWN
    rounds: list[Times] = []
    for most, samples in schedule.rounds:
        if spread <= schedule.enough or not conditions.in_time():
            break
        left = sorted(left, key=_cost_in(question, rounds))[:most] if most < len(left) else left
        found = yield from _round(question, left, samples, conditions)
        if found:
            between = [_regret(question, left, found, other) for other in rounds]
            spread = min([spread, *between])
            rounds.append(found)
    if len(rounds) < 2:  # a single round may fall into a busy moment
        return Choice(question.answers[0].parameters, UNKNOWN)
    return Choice(question.answers[_fastest(question, left, rounds)].parameters, spread)


def _round(
    question: Question[W, L, P], left: Sequence[int], samples: int, conditions: Conditions
) -> Generator[tuple[W, L], float | None, Times | None]:
    """Yields the trials of one round for the answers with the indices `left`, interleaved, so that
    a drift of the machine's speed affects all alike. Returns the seconds, or None if the machine
    was so busy that threads had to wait for cores."""
    together = question.schedule.together
    if together and not conditions.has_free_cores():
        return None
    answers = [question.answers[i] for i in left]
    wanted = sorted({each for answer in answers for each in enumerate(answer.ways)})
    times: dict[tuple[int, int], list[float]] = {each: [] for each in wanted}
    for _ in range(samples):
        for load, way in wanted:
            seconds = yield question.ways[way], question.loads[load]
            assert seconds is not None
            times[load, way].append(seconds)
    waited = together and not conditions.has_free_cores()
    return None if waited else times


def _cost_in(question: Question[W, L, P], rounds: Sequence[Times]) -> Callable[[int], float]:
    """Returns a function that maps an answer to its cost: the mean logarithm of the seconds of all
    its samples, so that one percent counts the same for every load."""

    def cost(answer: int) -> float:
        logs = []
        for each in enumerate(question.answers[answer].ways):
            samples = [seconds for times in rounds for seconds in times.get(each, ())]
            logs.append(math.log(question.schedule.cost(samples)))
        return sum(logs) / len(logs)

    return cost


def _fastest(question: Question[W, L, P], left: Sequence[int], rounds: Sequence[Times]) -> int:
    cost = _cost_in(question, rounds)
    best = min(left, key=cost)
    return 0 if cost(0) <= cost(best) + math.log1p(question.schedule.close) else best


def _regret(question: Question[W, L, P], left: Sequence[int], a: Times, b: Times) -> float:
    """Returns a measure of how far two rounds disagree, as a fraction: how much slower the fastest
    answer of one round is in the other round than the fastest answer there. Computed for both
    rounds; the larger fraction is returned."""
    in_a, in_b = (_cost_in(question, [times]) for times in (a, b))
    of_a, of_b = min(left, key=in_a), min(left, key=in_b)
    return math.expm1(max(in_b(of_a) - in_b(of_b), in_a(of_b) - in_a(of_a)))
