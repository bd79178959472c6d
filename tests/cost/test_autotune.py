"""Parameters of kernels are chosen by what a machine takes: right ones from any start, on a machine
that is simulated."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import qfx._C as _C
from qfx.cost.autotune import UNKNOWN, Answer, Choice, Question, choose
from qfx.cost.kernel_parameters import answer_questions
from qfx.cost.prefetch import KERNELS, tried_for
from qfx.cost.questions import (
    ALONE,
    CLOSE,
    NO_STEPS,
    QUESTIONS,
    SAMPLES,
    AnyQuestion,
    Format,
    Load,
    Tunings,
    Way,
)  # fmt: skip
from tests.kernels.test_tuning import TUNINGS

OPTIONS = [(way.hint, way.ahead) for way in tried_for(KERNELS)]
HINTS = [*dict.fromkeys(hint for hint, _ in OPTIONS)]
BANDWIDTH = 1e10  # bytes a second


@dataclass(frozen=True)
class Truth:
    """What a format is on a simulated machine."""

    speed: float  # steps a second
    call: float  # seconds
    hint: str
    ahead: int
    near: tuple[float, ...]  # factor of each hint for weights in the second cache
    pairs: float  # factor of two streams
    once: int  # rows up to which weights are best read once
    threads: float  # how much faster several are
    wake: float  # seconds

    def seconds(self, given: dict[str, Any], load: Load) -> float:
        far = load.calls == 0
        read = load.k * load.n / BANDWIDTH if far else 0.0
        taken = max(load.steps / self.speed, read)
        if far:
            taken *= 1.0 if given["hint"] == self.hint else 1.5
            taken *= 1 + 0.1 * abs(math.log2(max(given["ahead"], 64) / self.ahead))
        else:
            taken *= self.near[HINTS.index(given["hint"])]
        taken *= self.pairs if given["streams"] == 2 else 1.0
        taken *= 1.0 if (load.rows <= given["stream_rows"]) == (load.rows <= self.once) else 1.2
        woken = load.steps >= given["serial_steps"]
        return self.call + (taken / self.threads + self.wake if woken else taken)


TRUTHS = st.builds(
    Truth,
    speed=st.floats(1e10, 1e12),
    call=st.floats(1e-7, 1e-5),
    hint=st.sampled_from(HINTS),
    ahead=st.sampled_from([ahead for _, ahead in OPTIONS]),
    near=st.tuples(*[st.floats(1, 1.5)] * 3),
    pairs=st.floats(0.7, 1.3),
    once=st.sampled_from([0, 1, 2, 4, 12, 64]),
    threads=st.floats(0.5, 2),
    wake=st.floats(1e-6, 1e-4),
)


@dataclass
class Simulated:
    """A machine. Each call takes up to `noise` longer than it should, and at most 6 of any 70 in a
    row ten times as long: so a way is met by that in one of its samples of a round. `free`: what it
    says of its cores, in turns; `rounds`: after so many there is no time."""

    truths: dict[str, Truth]
    noise: float = 0.0
    seed: int = 0
    free: tuple[bool, ...] = (True,)
    rounds: int = 10**9
    calls: int = 0
    asked: int = 0
    chance: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self.chance.seed(self.seed)

    def seconds(self, way: Way, load: Load) -> float:
        self.calls += 1
        busy = 10 if self.noise and self.calls % 70 < 6 else 1
        true = self.truths[way.format].seconds(dict(way.parameters), load)
        return true * busy * (1 + self.noise * self.chance.random())

    def in_time(self) -> bool:
        self.rounds -= 1
        return self.rounds >= 0

    def has_free_cores(self) -> bool:
        self.asked += 1
        return self.free[self.asked % len(self.free)]

    def formats(self) -> list[Format]:
        """The second one stands below the first."""
        speeds = {name: truth.speed for name, truth in self.truths.items()}
        return [
            Format("tall", 16, 4, "low", speeds["tall"]),
            Format("low", 2, 0, "", speeds["low"]),
        ]

    def regrets(self, found: Tunings, threads: int) -> dict[str, float]:
        """For each question how much longer, as a logarithm, than with the best of its answers."""
        asked = ((a, f, a(f, found, threads)) for a in QUESTIONS for f in self.formats())
        return {f"{a.__name__} of {f.name}": self._regret(q) for a, f, q in asked if q}

    def _regret(self, question: AnyQuestion) -> float:
        def cost(ways: tuple[int, ...]) -> float:
            pairs = zip((question.ways[way] for way in ways), question.loads, strict=True)
            taken = [self.truths[w.format].seconds(dict(w.parameters), load) for w, load in pairs]
            return sum(map(math.log, taken)) / len(taken)

        costs = [cost(answer.ways) for answer in question.answers]
        return costs[0] - min(costs)


MACHINES = st.builds(
    Simulated,
    st.fixed_dictionaries({"tall": TRUTHS, "low": TRUTHS}),
    st.sampled_from([0.0, 0.02, 0.1]),
    st.integers(0, 10**6),
)
STARTS = st.fixed_dictionaries({"tall": TUNINGS, "low": TUNINGS})


@given(MACHINES, STARTS, st.sampled_from([1, 2]))
def test_wrong_parameters_are_corrected(machine: Simulated, start: Tunings, threads: int) -> None:
    """What is measured of a way is at least its true time and at most `noise` longer, so that what
    seems fastest is at most so much slower than the best; what is set stays if it is within CLOSE
    of that."""
    found = answer_questions(machine.formats(), start, threads, machine)
    bound = math.log1p(machine.noise) + math.log1p(CLOSE)
    regrets = machine.regrets(found.formats, threads)
    assert {name: r for name, r in regrets.items() if r > bound + 1e-9} == {}
    assert {"hint of low", "streams of tall", "minimum_rows of tall"} < {*regrets}
    assert found.settled or machine.noise > CLOSE


@given(MACHINES, STARTS)
def test_what_is_right_stays(machine: Simulated, start: Tunings) -> None:
    machine.noise = 0.0
    once = answer_questions(machine.formats(), start, 2, machine)
    assert answer_questions(machine.formats(), once.formats, 2, machine).formats == once.formats


ONE = Truth(1e11, 1e-6, "t1", 2048, (1.0, 1.0, 1.0), 0.8, 4, 1.9, 5e-6)
START = dict.fromkeys(("tall", "low"), _C.default_tuning("ref")["s8s8"])


def simulated(**others: Any) -> Simulated:
    return Simulated({"tall": ONE, "low": replace(ONE, speed=2e10)}, **others)


def test_threads_that_gain_nothing_are_never_woken() -> None:
    machine = Simulated(dict.fromkeys(("tall", "low"), replace(ONE, threads=0.9)))
    found = answer_questions(machine.formats(), START, 2, machine)
    assert {f["serial_steps"] for f in found.formats.values()} == {NO_STEPS} and found.settled


@pytest.mark.parametrize("free", [(False,), (False, True)])
def test_threads_that_waited_for_cores_say_nothing(free: tuple[bool, ...]) -> None:
    """They would seem to gain nothing, and never be woken again. Before or behind a round."""
    machine = simulated(free=free)
    found = answer_questions(machine.formats(), START, 2, machine)
    assert {f["serial_steps"] for f in found.formats.values()} == {START["low"]["serial_steps"]}
    assert found.formats["tall"]["hint"] == "t1"  # one thread's own clock needs no idle machine
    assert found.spread == UNKNOWN and not found.settled


def test_without_time_everything_stays_and_is_not_settled() -> None:
    for rounds in (0, 1):  # to compare takes two
        machine = simulated(rounds=rounds)
        found = answer_questions(machine.formats(), START, 2, machine)
        assert found.spread == UNKNOWN and not found.settled
        assert found.formats == START


def test_rounds_that_do_not_agree_are_counted_and_told() -> None:
    """Each round another way is the fastest, by half."""

    class Fickle(Simulated):
        def seconds(self, way: Way, load: Load) -> float:
            hint, ahead = OPTIONS[self.rounds % len(OPTIONS)]
            return (
                1.0 if (way.parameters["hint"], way.parameters["ahead"]) == (hint, ahead) else 1.5
            )

    machine = Fickle({"tall": ONE, "low": ONE}, rounds=1000)
    found = answer_questions(machine.formats()[1:], {"low": START["low"]}, 1, machine)
    assert not found.settled and found.spread == pytest.approx(0.5)
    assert machine.rounds >= 1000 - len(ALONE.rounds) - 2  # of the other question two rounds agree


def test_one_disturbed_sample_of_each_round_changes_nothing() -> None:
    """The last one, of the better way."""

    class Disturbed(Simulated):
        def seconds(self, way: Way, load: Load) -> float:
            self.calls += way.format == "low"
            disturbed = way.format == "low" and self.calls % SAMPLES == 0
            return 10.0 if disturbed else {"tall": 2.0, "low": 1.0}[way.format]

    ways = [Way("tall", {}), Way("low", {})]
    answers = [Answer({}, (0,)), Answer({"hint": "t1"}, (1,))]
    question: AnyQuestion = Question([Load(1, 1, 1, 1)], ways, answers, ALONE)
    assert choose(question, Disturbed({})) == Choice({"hint": "t1"}, 0.0)
