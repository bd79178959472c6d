"""Linears that share an input are one instruction of a program, and give the bits of several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import qfx._C as _C
from qfx.ops.code import Code
from qfx.programs import Runner
from qfx.programs.bytecode import OPERATIONS
from qfx.programs.executor import Run
from tests.conftest import on_threads
from tests.lib.several import Case, Weight, Weights, alone, drawn_case, together
from tests.programs.traced import aten, built, same_bits

ops = torch.ops.qfx
LINEAR = OPERATIONS.index("linear")


@pytest.fixture(autouse=True)
def _isa() -> Iterator[None]:
    before = _C.isa()
    yield
    _C.set_isa(before)


def weights_of(runner: Runner) -> list[int]:
    """How many each linear instruction of its programs has."""
    found = []
    for part in runner.parts:
        words = part.words.tolist() if isinstance(part, Run) else []
        while words:
            own, words = words[1 : 1 + words[0]], words[1 + words[0] :]
            if own[0] == LINEAR:
                behind_x = 1 + 4 + 2 * own[4]
                factor = 4 + 2 * own[behind_x + 4] if own[behind_x] else 0
                found.append(own[behind_x + 1 + factor + 5])
    return found


@settings(max_examples=max(settings().max_examples // 2, 10))
@given(data=st.data())
def test_they_give_the_bits_of_several(data: st.DataObject) -> None:
    """Weights of all kinds, and some without rows."""
    case = drawn_case(data.draw)
    runner = built(lambda x: together(case, x), (case.x,))
    sizes = [w.layout.n for w in case.weights if w.layout.n * len(case.x)]
    assert weights_of(runner) == ([len(sizes)] if sizes else []) and runner.outside == []
    for isa in _C.isas():
        _C.set_isa(isa)
        with on_threads(data.draw(st.sampled_from([1, 2]))):
            assert all(map(same_bits, runner(case.x), alone(case))), isa


def _plain(x: Tensor, *weights: Weight) -> Case:
    return Case(x, weights, list(Code()))


@pytest.mark.parametrize("streams", [1, 2])
def test_pairs_of_panels_are_of_one_weight(streams: int) -> None:
    of = Weights(0, 64)
    case = _plain(torch.randn(1, 64), *map(of.int8, (96, 32, 160)))
    runner = built(lambda x: together(case, x), (case.x,))
    assert weights_of(runner) == [3]
    (part,) = runner.parts
    assert isinstance(part, Run) and len(part.program.weights) == 3
    part.program.stream("t1", 1024, streams)
    assert all(map(same_bits, runner(case.x), alone(case)))


@pytest.mark.parametrize("rows", [1, 40])
def test_threads_share_the_panels_of_all(rows: int) -> None:
    """So much work that a second thread begins within a weight."""
    of = Weights(0, 512)
    sizes = (1000, 96, 3000)
    every = (*map(of.int8, sizes), *(of.in_groups(n, 64, "zero") for n in sizes))
    case = _plain(torch.randn(rows, 512), *every)
    runner = built(lambda x: together(case, x), (case.x,))
    assert weights_of(runner) == [6]
    with on_threads(2):
        found = runner(case.x)
    with on_threads(1):
        assert all(map(same_bits, found, alone(case)))


def test_each_takes_the_activation_that_alone_reads_it() -> None:
    of = Weights(0, 64)
    one, two, three = map(of.int8, (32, 32, 48))
    case = _plain(torch.randn(2, 64), one, two, three)

    def f(x: Any) -> Any:
        gate, up, other = together(case, x)
        return [aten.mul.Tensor(aten.silu.default(gate), up), other, aten.relu.default(other)]

    runner = built(f, (case.x,))
    (part,) = runner.parts
    assert isinstance(part, Run) and weights_of(runner) == [3]
    activated = Case(case.x, (one._replace(activation="silu"), two, three), case.code)
    gate, up, other = alone(activated)
    expected = [gate * up, other, other.relu()]
    assert all(map(same_bits, runner(case.x), expected))


def test_a_result_that_nobody_reads() -> None:
    """What reads the others is the same, and no part stands for it."""
    of = Weights(0, 64)
    case = _plain(torch.randn(2, 64), of.int8(32), of.int8(48))
    runner = built(lambda x: together(case, x)[1], (case.x,))
    assert same_bits(runner(case.x)[0], alone(case)[1]) and runner.outside == []


def test_a_weight_that_a_graph_is_given_is_pytorchs() -> None:
    """So are all linears of that call, and none of their activations."""
    of = Weights(0, 64)
    one, two = of.int8(32), of.int8(48)

    def f(x: Any, w: Any) -> Any:
        a, b = together(_plain(x, one, two._replace(packed=w)))
        return [aten.relu.default(a), aten.relu.default(b)]

    x = torch.randn(2, 64)
    runner = built(f, (x, two.packed))
    assert runner.outside == ["qfx.linears.default"]
    assert all(map(same_bits, runner(x, two.packed), f(x, two.packed)))
