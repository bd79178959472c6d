"""How weights pass by: the fastest way is found among noise, and no way changes a bit."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import qfx._C as _C
from qfx.cost.autotune import Always, Tuner
from qfx.cost.prefetch import Prefetch
from qfx.ops.code import Code
from qfx.ops.layout import Layout
from qfx.programs.streaming import DEFAULT, QUESTION, SCHEDULE, TRIALS, WAYS, Streaming, next_way
from tests.conftest import on_isa, on_threads
from tests.lib.pairs import every
from tests.programs.traced import built, same_bits

ops = torch.ops.qfx


Choosing = Tuner[Prefetch, None, Prefetch]


def _tuner() -> Choosing:
    return Tuner(QUESTION, Always())


def _chosen(seconds: dict[Prefetch, float], late: Collection[int] = ()) -> Choosing:
    """After all rounds; the steps with these numbers take three times as long."""
    tuner = _tuner()
    for step in range(TRIALS):
        assert tuner.choice is None
        tuner.took(seconds[next_way(tuner)] * (3 if step in late else 1))
    assert tuner.choice is not None
    return tuner


@given(
    st.sampled_from(WAYS),
    st.sets(st.integers(0, TRIALS - 1), max_size=TRIALS // 8),
    st.floats(1, 9),
)
def test_the_fastest_is_found_where_some_steps_are_held_up(
    best: Prefetch, late: set[int], others: float
) -> None:
    held = {step for step in late if step % 3}  # never all three runs of a way
    seconds = {way: 1.0 + 0.2 * others for way in WAYS} | {best: 1.0}
    assert next_way(_chosen(seconds, held)) == best


@given(st.permutations(WAYS), st.floats(0.2, 3))
def test_the_default_stays_where_none_is_clearly_faster(
    order: list[Prefetch], spread: float
) -> None:
    least = 1 / (1 + 0.99 * SCHEDULE.close)
    seconds = {way: least + (1 - least) * min(i * spread / 9, 1) for i, way in enumerate(order)}
    assert next_way(_chosen(seconds | {DEFAULT: 1.0})) == DEFAULT


def test_every_way_is_tried_in_turn() -> None:
    tuner, tried = _tuner(), []
    for _ in WAYS:
        tried.append(next_way(tuner))
        tuner.took(1.0)
    assert tried == list(WAYS)


def test_a_choice_is_made_once() -> None:
    tuner = _chosen(dict.fromkeys(WAYS, 1.0) | {WAYS[3]: 0.5})
    tuner.took(100.0)
    assert next_way(tuner) == WAYS[3]


class _Program:
    """Notes how it is told to run."""

    def __init__(self, rows: list[int]) -> None:
        self.weights = [(64, 64, count) for count in rows]
        self.told: list[Prefetch] = []

    def stream(self, *way: Any) -> None:
        self.told.append(Prefetch(*way))

    def run(self, given: list[int]) -> None:
        pass


@pytest.mark.parametrize(
    ("rows", "chooses"), [([1, 1], True), ([16], True), ([1, 17], False), ([], False)]
)
def test_few_rows_alone_choose(rows: list[int], chooses: bool) -> None:
    program: Any = _Program(rows)
    streaming = Streaming(program)
    for _ in range(TRIALS + 5):
        streaming.run([])
    assert {*program.told} == ({*WAYS} if chooses else set())
    assert not chooses or program.told[-1] == streaming.way


def test_each_number_of_threads_makes_its_own_choice() -> None:
    program: Any = _Program([1])
    streaming = Streaming(program)
    for threads in (1, 2, 1):
        with on_threads(threads):
            streaming.run([])
    assert {n: next_way(t) for n, t in streaming.tuners.items()} == {1: WAYS[2], 2: WAYS[1]}


@pytest.mark.parametrize(
    "layout, rows",
    every([Layout(160), Layout(160, 8, 64, 64), Layout(160, 4, 64, 64, 1)], [1, 3, 9]),
)
def test_no_way_changes_a_bit(layout: Layout, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 192, generator=generator)
    codes = torch.randint(-8, 8, (160, 192), dtype=torch.int8, generator=generator)
    scale = torch.rand(160, 3 if layout.group else 1, generator=generator).bfloat16().float()
    zero = torch.randint(-8, 8, (160, 3), dtype=torch.int32, generator=generator)
    shift = zero if layout.shift else None
    packed = ops.pack_weight.default(codes, scale, shift, None, layout.bits, layout.group)
    how: Any = (packed, list(layout), None, list(Code()), "none", torch.float32)
    runner = built(lambda x: ops.linear_dynamic.default(x, *how), (x,))
    (program,) = (part.program for part in runner.parts)  # type: ignore[union-attr]
    for isa in _C.isas():
        with on_isa(isa):
            program.stream("")
            (expected,) = runner(x)
            for way in (*WAYS, Prefetch("t0", 0), Prefetch("nta", 1 << 20, 2)):
                program.stream(*way)
                assert same_bits(runner(x)[0], expected), (isa, way)


WRONG = {
    "hint": (("t2",), "hint='t2' is none of: t0, t1, nta"),
    "ahead": (("t1", -1), "ahead=-1 is not between 0"),
    "far ahead": (("t1", (1 << 20) + 1), "ahead=1048577 is not between"),
    "no stream": (("t1", 64, 0), "streams=0 is not between 1 and 2"),
}


@pytest.mark.parametrize("name", WRONG)
def test_ways_that_are_none(name: str) -> None:
    way, why = WRONG[name]
    program = _C.Program([], [64], [0])
    with pytest.raises(ValueError, match=why):
        program.stream(*way)
