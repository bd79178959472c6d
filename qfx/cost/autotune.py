"""Choosing: of several answers to a question the fastest, found by trials in rounds.

Nothing here knows a clock, a kernel or a program. A `Tuner` says which trial is next, is told how
long it took, and remembers what it has chosen; `choose` has a machine run all trials at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

UNKNOWN = 1.0  # the spread where no two rounds could be compared
ALL = 1 << 30  # answers of a round: as many as there are
_LEAST = 1e-9  # seconds
W = TypeVar("W")  # a way
L = TypeVar("L")  # a load
P = TypeVar("P")  # what an answer sets
W_in = TypeVar("W_in", contravariant=True)
L_in = TypeVar("L_in", contravariant=True)


class Round(NamedTuple):
    """A round keeps at most `answers` of the fastest and runs each trial `samples` times."""

    answers: int
    samples: int


@dataclass(frozen=True)
class Schedule:
    """A schedule says how trials are run. `cost`: which seconds count of those of a trial.
    `close`: ways whose times differ by a smaller part of them are equally fast. `enough`: a spread
    of two rounds below which no other round runs. `together`: several threads run, so that each
    needs a core."""

    rounds: tuple[Round, ...]
    cost: Callable[[Sequence[float]], float]
    close: float
    enough: float
    together: bool = False


@dataclass(frozen=True)
class Answer(Generic[P]):
    """What it sets, and which of the ways then runs each of the loads."""

    parameters: P
    ways: tuple[int, ...]


@dataclass(frozen=True)
class Question(Generic[W, L, P]):
    """The first answer is what is set already, and stays where none is clearly faster."""

    loads: Sequence[L]
    ways: Sequence[W]
    answers: Sequence[Answer[P]]
    schedule: Schedule


@dataclass(frozen=True)
class Choice(Generic[P]):
    """What to set, and how much slower what one round found fastest was in another."""

    parameters: P
    spread: float


class Conditions(Protocol):
    """A machine is asked between rounds whether another one may run."""

    def in_time(self) -> bool:
        """Whether another round may begin."""
        ...

    def has_free_cores(self) -> bool:
        """Whether each thread gets one now; if not, what several threads take says nothing."""
        ...


class Machine(Conditions, Protocol[W_in, L_in]):
    """A timer runs a load in a way and returns its seconds."""

    def seconds(self, way: W_in, load: L_in) -> float: ...


class Always:
    """The conditions of one who has time and cores."""

    def in_time(self) -> bool:
        return True

    def has_free_cores(self) -> bool:
        return True


class Tuner(Generic[W, L, P]):
    """`trial`: the way and the load to run next; None once there is a `choice`."""

    def __init__(self, question: Question[W, L, P], conditions: Conditions) -> None:
        self.trial: tuple[W, L] | None = None
        self.choice: Choice[P] | None = None
        self._trials = _trials(question, conditions)
        self._go_on(None)

    def took(self, seconds: float) -> None:
        """The trial that was next."""
        if self.trial is not None:
            self._go_on(max(seconds, _LEAST))

    def _go_on(self, seconds: float | None) -> None:
        try:
            self.trial = self._trials.send(seconds)
        except StopIteration as end:
            self.trial, self.choice = None, end.value


def choose(question: Question[W, L, P], machine: Machine[W, L]) -> Choice[P]:
    """Runs all trials on a machine."""
    tuner = Tuner(question, machine)
    while tuner.trial is not None:
        tuner.took(machine.seconds(*tuner.trial))
    assert tuner.choice is not None
    return tuner.choice


Times = Mapping[tuple[int, int], list[float]]  # seconds, by the numbers of load and way


def _trials(
    question: Question[W, L, P], conditions: Conditions
) -> Generator[tuple[W, L], float | None, Choice[P]]:
    """Rounds, while there is time, until what is fastest in each of two is about as fast as
    anything in the other."""
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
    if len(rounds) < 2:  # one alone may be of a busy moment
        return Choice(question.answers[0].parameters, UNKNOWN)
    return Choice(question.answers[_fastest(question, left, rounds)].parameters, spread)


def _round(
    question: Question[W, L, P], left: Sequence[int], samples: int, conditions: Conditions
) -> Generator[tuple[W, L], float | None, Times | None]:
    """Ways in turns, so that a drift of the machine's speed meets them alike. None where threads
    had to wait for cores."""
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
    """Returns a function that gives the cost of an answer: the mean logarithm of the seconds of
    all samples, so that a percent of any load counts alike."""

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
    """How much slower what is fastest in each is in the other than the fastest there."""
    in_a, in_b = (_cost_in(question, [times]) for times in (a, b))
    of_a, of_b = min(left, key=in_a), min(left, key=in_b)
    return math.expm1(max(in_b(of_a) - in_b(of_b), in_a(of_b) - in_a(of_a)))
