"""Parameters of kernels are chosen by what a machine takes: right ones from any start, on a machine
that is simulated; kept, shown, and asked again where they did not settle."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import qfx._C as _C
import torch
from hypothesis import given
from hypothesis import strategies as st

import qfx
from qfx.cost import disk, kernels
from qfx.cost.choosing import (
    CLOSE,
    MOST_ROUNDS,
    SAMPLES,
    UNKNOWN,
    Answer,
    Choice,
    Load,
    Question,
    Way,
    choose,
)  # fmt: skip
from qfx.cost.questions import AHEAD, HINTS, NO_STEPS, QUESTIONS, Format, Tunings
from qfx.cost.tuned import Tuned, tuned
from tests.conftest import on_threads
from tests.kernels.test_tuning import TUNINGS

OPTIONS = list(itertools.product(HINTS, AHEAD))
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
    ahead=st.sampled_from(AHEAD),
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

    def _regret(self, question: Question) -> float:
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
    found = tuned(machine.formats(), start, threads, machine)
    bound = math.log1p(machine.noise) + math.log1p(CLOSE)
    regrets = machine.regrets(found.formats, threads)
    assert {name: r for name, r in regrets.items() if r > bound + 1e-9} == {}
    assert {"hint of low", "streams of tall", "minimum_rows of tall"} < {*regrets}
    assert found.settled or machine.noise > CLOSE


@given(MACHINES, STARTS)
def test_what_is_right_stays(machine: Simulated, start: Tunings) -> None:
    machine.noise = 0.0
    once = tuned(machine.formats(), start, 2, machine)
    assert tuned(machine.formats(), once.formats, 2, machine).formats == once.formats


ONE = Truth(1e11, 1e-6, "t1", 2048, (1.0, 1.0, 1.0), 0.8, 4, 1.9, 5e-6)
START = dict.fromkeys(("tall", "low"), _C.default_tuning("ref")["s8s8"])


def simulated(**others: Any) -> Simulated:
    return Simulated({"tall": ONE, "low": replace(ONE, speed=2e10)}, **others)


def test_threads_that_gain_nothing_are_never_woken() -> None:
    machine = Simulated(dict.fromkeys(("tall", "low"), replace(ONE, threads=0.9)))
    found = tuned(machine.formats(), START, 2, machine)
    assert {f["serial_steps"] for f in found.formats.values()} == {NO_STEPS} and found.settled


@pytest.mark.parametrize("free", [(False,), (False, True)])
def test_threads_that_waited_for_cores_say_nothing(free: tuple[bool, ...]) -> None:
    """They would seem to gain nothing, and never be woken again. Before or behind a round."""
    machine = simulated(free=free)
    found = tuned(machine.formats(), START, 2, machine)
    assert {f["serial_steps"] for f in found.formats.values()} == {START["low"]["serial_steps"]}
    assert found.formats["tall"]["hint"] == "t1"  # one thread's own clock needs no idle machine
    assert found.spread == UNKNOWN and not found.settled


def test_without_time_everything_stays_and_is_not_settled() -> None:
    for rounds in (0, 1):  # to compare takes two
        machine = simulated(rounds=rounds)
        found = tuned(machine.formats(), START, 2, machine)
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
    found = tuned(machine.formats()[1:], {"low": START["low"]}, 1, machine)
    assert not found.settled and found.spread == pytest.approx(0.5)
    assert machine.rounds >= 1000 - MOST_ROUNDS - 2  # of the other question two rounds agree


def test_one_disturbed_sample_of_each_round_changes_nothing() -> None:
    """The last one, of the better way."""

    class Disturbed(Simulated):
        def seconds(self, way: Way, load: Load) -> float:
            self.calls += way.format == "low"
            disturbed = way.format == "low" and self.calls % SAMPLES == 0
            return 10.0 if disturbed else {"tall": 2.0, "low": 1.0}[way.format]

    ways = [Way("tall", {}), Way("low", {})]
    question = Question([Load(1, 1, 1, 1)], ways, [Answer({}, (0,)), Answer({"hint": "t1"}, (1,))])
    assert choose(question, Disturbed({})) == Choice({"hint": "t1"}, 0.0)


# --- on this machine ---


@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_chosen_here_is_legal_and_nothing_is_set(threads: int) -> None:
    for isa in _C.isas():
        before = _C.tuning(isa)
        with on_threads(threads):
            found = kernels.measured(isa, threads)
        _C.check_tuning(isa, {name: dict(given) for name, given in found.formats.items()})
        assert _C.tuning(isa) == before and [*found.formats] == [*before]


def test_a_product_of_more_rows_than_it_was_made_for_is_refused() -> None:
    with pytest.raises(ValueError, match="a product of 3 rows, made for 2"):
        _C.TimedProduct(2, 64, 32, 1).seconds("ref", "s8s8", {}, 3, 1)


# --- kept and shown ---

OTHER = {"ahead": 640, "hint": "t1"}


@pytest.fixture
def isa(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A process that has tuned nothing yet, of a user without files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "_SET", {})
    kernels._chosen.cache_clear()
    name = _C.isa()
    before = _C.tuning(name)
    _C.set_tuning(name, _C.default_tuning(name))
    yield name
    _C.set_tuning(name, before)
    kernels._chosen.cache_clear()


class Measuring:
    """Takes the place of `measured`, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *spreads: float) -> None:
        self.spreads, self.calls = spreads, 0
        monkeypatch.setattr(kernels, "measured", self)

    def __call__(self, isa: str, threads: int) -> Tuned:
        self.calls += 1
        spread = self.spreads[self.calls - 1]
        formats = {name: given | OTHER for name, given in _C.default_tuning(isa).items()}
        return Tuned(formats, dict.fromkeys(formats, spread))

    def in_new_process(self) -> int:
        """Tunes, and returns how often was measured."""
        kernels._chosen.cache_clear()
        before = self.calls
        kernels.tune_kernels()
        return self.calls - before


def origins() -> set[str]:
    return {format.origin for format in qfx.kernels().formats}


def test_what_was_chosen_is_in_use_and_a_second_process_measures_nothing(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring = Measuring(monkeypatch, 0.01)
    assert origins() == {kernels.DEFAULT}
    assert [measuring.in_new_process() for _ in range(3)] == [1, 0, 0]
    assert all(given.items() >= OTHER.items() for given in _C.tuning(isa).values())
    assert origins() == {"measured here, spread 1.0%"}
    assert "measured here, spread 1.0%" in str(qfx.kernels())


def test_each_number_of_threads_is_measured_apart(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring = Measuring(monkeypatch, 0.0, 0.0)
    with on_threads(1):
        assert measuring.in_new_process() == 1
    assert [measuring.in_new_process() for _ in range(2)] == [1, 0]


def test_what_was_set_by_hand_stays(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measuring = Measuring(monkeypatch, 0.0)
    _C.set_tuning(isa, {name: {"ahead": 4032} for name in _C.tuning(isa)})
    assert measuring.in_new_process() == 1
    assert {given["ahead"] for given in _C.tuning(isa).values()} == {4032}
    assert origins() == {kernels.BY_HAND}


def test_a_high_spread_is_measured_again_and_the_best_stays(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring = Measuring(monkeypatch, 0.5, 0.2, 0.9)
    assert [measuring.in_new_process() for _ in range(disk.TRIES + 2)] == [1, 1, 1, 0, 0]
    assert origins() == {"measured here, not settled: spread 20.0%"}


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text[:-9],
        lambda text: text.replace("640", "-1"),
        lambda text: text.replace('"t1"', '"t9"'),
        lambda text: text.replace('"ahead"', '"behind"'),
        lambda text: text.replace('"ahead": 640, ', ""),
        lambda text: text.replace('"s8s8', '"s9s9'),
        lambda text: text.replace("0.0", "1e9"),
        lambda text: text.replace("1\n", "", 1),
        lambda text: text.replace("1\n", "0\n", 1),
        lambda text: "1\n[]",
    ],
)
def test_a_file_that_is_none_is_measured_anew(
    change: Any, isa: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measuring = Measuring(monkeypatch, 0.0, 0.0)
    measuring.in_new_process()
    (path,) = (tmp_path / "qfx").iterdir()
    text = path.read_text()
    assert json.loads(text.partition("\n")[2])["spreads"] and change(text) != text
    path.write_text(change(text))
    assert [measuring.in_new_process() for _ in range(2)] == [1, 0]
    assert path.read_text() == text


@pytest.mark.real_cost
def test_a_compilation_tunes_and_an_operator_does_not(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring = Measuring(monkeypatch, 0.0)
    qfx.quantize(torch.ones(4, 8), qfx.QSpec())
    qfx.nn.functional.linear(torch.ones(2, 8), torch.ones(4, 8))
    assert measuring.calls == 0
    qfx.rewrite(qfx.trace(torch.nn.Linear(8, 4)))  # its sizes are not known: nothing is priced
    assert measuring.calls == 1
