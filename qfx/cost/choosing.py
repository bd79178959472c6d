"""Choosing: of several answers to a question the fastest, in rounds until two of them agree.

Nothing here knows a clock or a kernel: a machine says what a way to run a load takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

Parameters = Mapping[str, int | str]  # of a format, by name
SAMPLES = 3  # of each way in a round, the least of which counts
TOGETHER = 2  # the same where several threads work, which takes long
MOST_ROUNDS = 4
CLOSE = 0.03  # a part of the time; what differs by less is equally fast
UNKNOWN = 1.0  # the spread where no two rounds could be compared


class Load(NamedTuple):
    """A product of codes [rows, k] and a weight [n, k]. `calls`: 0 for one whose weight comes from
    memory, else so many in a row."""

    rows: int
    k: int
    n: int
    calls: int

    @property
    def steps(self) -> int:
        """Multiply-accumulates."""
        return self.rows * self.k * self.n


class Way(NamedTuple):
    """How a load may be run: on a format, with these parameters."""

    format: str
    parameters: Parameters


class Answer(NamedTuple):
    """What it sets, and which of the ways then runs each of the loads."""

    parameters: Parameters
    ways: tuple[int, ...]


class Question(NamedTuple):
    """The first answer is what is set already, and stays where none is faster by more than CLOSE.
    `together`: some ways run on several threads, so that each needs a core."""

    loads: Sequence[Load]
    ways: Sequence[Way]
    answers: Sequence[Answer]
    together: bool = False


class Choice(NamedTuple):
    """What to set, and how much slower what one round found fastest was in another."""

    parameters: Parameters
    spread: float


class Machine(Protocol):
    """What is asked."""

    def seconds(self, way: Way, load: Load) -> float: ...

    def in_time(self) -> bool:
        """Whether another round may begin."""
        ...

    def has_free_cores(self) -> bool:
        """Whether each thread gets one now; if not, what several threads take says nothing."""
        ...


Times = Mapping[tuple[int, int], float]  # least seconds, by the numbers of way and load


def choose(question: Question, machine: Machine) -> Choice:
    """Asks in rounds, while there is time, until what is fastest in each of two is about as fast as
    anything in the other."""
    rounds: list[Times] = []
    spread = UNKNOWN
    for _ in range(MOST_ROUNDS):
        if spread <= CLOSE or not machine.in_time():
            break
        if found := _round(question, machine):
            between = [_regret(question, found, other) for other in rounds]
            spread = min([spread, *between])
            rounds.append(found)
    if len(rounds) < 2:  # one alone may be of a busy moment
        return Choice({}, UNKNOWN)
    least = {key: min(times[key] for times in rounds) for key in rounds[0]}
    return Choice(_fastest(question, least).parameters, spread)


def _round(question: Question, machine: Machine) -> Times | None:
    """Ways in turns, so that a drift of the machine's speed meets them alike. None where threads
    had to wait for cores."""
    if question.together and not machine.has_free_cores():
        return None
    loads = range(len(question.loads))
    wanted = sorted({(load, answer.ways[load]) for answer in question.answers for load in loads})
    times = {(way, load): math.inf for load, way in wanted}
    for _ in range(TOGETHER if question.together else SAMPLES):
        for load, way in wanted:
            taken = machine.seconds(question.ways[way], question.loads[load])
            times[way, load] = min(times[way, load], taken)
    waited = question.together and not machine.has_free_cores()
    return None if waited else times


def _cost(answer: Answer, times: Times) -> float:
    """The mean logarithm of seconds: a percent of any load counts alike."""
    taken = [times[way, load] for load, way in enumerate(answer.ways)]
    return sum(map(math.log, taken)) / len(taken)


def _fastest(question: Question, times: Times) -> Answer:
    costs = [_cost(answer, times) for answer in question.answers]
    close = costs[0] <= min(costs) + math.log1p(CLOSE)
    return question.answers[0 if close else costs.index(min(costs))]


def _regret(question: Question, a: Times, b: Times) -> float:
    """How much slower what is fastest in each is in the other than the fastest there."""
    costs = [[_cost(answer, times) for answer in question.answers] for times in (a, b)]
    in_a, in_b = costs
    of_a, of_b = in_a.index(min(in_a)), in_b.index(min(in_b))
    return math.expm1(max(in_b[of_a] - in_b[of_b], in_a[of_b] - in_a[of_a]))
