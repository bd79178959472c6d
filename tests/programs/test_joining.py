"""Linears of the same floats are one instruction, and give the bits of several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import qfx._C as _C
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qfx.ops.code import Code
from qfx.ops.kv_cache import kv_empty
from qfx.ops.layout import Layout
from qfx.programs import Runner
from qfx.programs.running import Run
from qfx.programs.words import OPERATIONS
from tests.conftest import on_threads
from tests.programs.traced import aten, built, same_bits

ops = torch.ops.qfx
F32 = torch.float32
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


class Weight(NamedTuple):
    """A packed one, and what its caller knows of it."""

    packed: Tensor
    layout: Layout


class Weights:
    """Random ones of `k` columns; `g`: their generator."""

    def __init__(self, seed: int, k: int) -> None:
        self.g, self.k = torch.Generator().manual_seed(seed), k

    def codes(self, low: int, high: int, *sizes: int) -> Tensor:
        return torch.randint(low, high + 1, sizes, generator=self.g, dtype=torch.int8)

    def int8(self, n: int, most: int = 127) -> Weight:
        codes, scale = self.codes(-most, most, n, self.k), torch.rand(n, generator=self.g)
        return Weight(ops.pack_weight.default(codes, scale), Layout(n))

    def in_groups(self, n: int, group: int, shift: str, bits: int = 4) -> Weight:
        each = (n, -(-self.k // group))
        scale, minimum = torch.rand(2, *each, generator=self.g).bfloat16().float()
        zero = self.codes(-8, 7, *each).int()
        shifts = (zero if shift == "zero" else None, minimum if shift == "minimum" else None)
        codes = self.codes(-8, 7, n, self.k)
        packed = ops.pack_weight.default(codes, scale, *shifts, bits, group)
        return Weight(packed, Layout(n, bits, group, group, int(shift != "none")))


def linear(x: Any, w: Weight, bias: Any = None, act: str = "none", **how: Any) -> Any:
    """`how`: the fields of `Code`, and a factor."""
    factor = how.pop("factor", None)
    end: Any = (bias, list(Code(**how)), act, F32, factor)
    return ops.linear_dynamic.default(x, w.packed, list(w.layout), *end)


@settings(max_examples=max(settings().max_examples // 2, 10))
@given(data=st.data())
def test_they_give_the_bits_of_several(data: st.DataObject) -> None:
    """Narrow and wide weights, groups, few bits and shifts, which need rows of other kinds."""
    draw = data.draw
    k = draw(st.sampled_from([1, 20, 64, 192]))
    of, group = Weights(draw(st.integers(0, 99)), k), draw(st.sampled_from([0, 0, 32, 64]))
    how = {
        "per_tensor": 0 if group else draw(st.sampled_from([0, 1])),
        "bits": draw(st.integers(2, 8)),
        "symmetric": draw(st.sampled_from([0, 1])),
        "rotation": 64 if k % 64 == 0 and draw(st.booleans()) else 0,
        "factor": torch.rand(k) + 0.5 if draw(st.booleans()) else None,
        "group": group,
    }
    kinds = ["none", "zero", "minimum", "int8 none", "int8 zero"]
    kinds += [] if group else ["int8", "narrow"]
    calls: list[Callable[[Any], Any]] = []
    for _ in range(draw(st.integers(2, 5))):
        kind, n = draw(st.sampled_from(kinds)), draw(st.sampled_from([1, 31, 32, 70]))
        if kind in ("int8", "narrow"):
            w = of.int8(n, 127 if kind == "int8" else 63)
        else:
            size, bits = group or draw(st.sampled_from([32, 64])), 8 if "int8" in kind else 4
            w = of.in_groups(n, size, kind.removeprefix("int8 "), bits)
        bias = torch.randn(n) if draw(st.booleans()) else None
        act = draw(st.sampled_from(["none", "relu", "silu"]))
        calls.append(lambda x, w=w, b=bias, a=act: linear(x, w, b, a, **how))
    f = lambda x: [call(x) for call in calls]  # noqa: E731
    x = torch.randn(draw(st.sampled_from([1, 3, 8, 40])), k, generator=of.g)
    runner = built(f, (x,))
    assert sum(weights_of(runner)) == len(calls)
    for isa in _C.isas():
        _C.set_isa(isa)
        with on_threads(draw(st.sampled_from([1, 2]))):
            assert all(map(same_bits, runner(x), f(x))), isa


@pytest.mark.parametrize("streams", [1, 2])
def test_pairs_of_panels_are_of_one_weight(streams: int) -> None:
    of = Weights(0, 64)
    three = [of.int8(n) for n in (96, 32, 160)]
    f = lambda x: [linear(x, w) for w in three]  # noqa: E731
    x = torch.randn(1, 64)
    runner = built(f, (x,))
    assert weights_of(runner) == [3]
    (part,) = runner.parts
    assert isinstance(part, Run) and len(part.program.weights) == 3
    part.program.stream("t1", 1024, streams)
    assert all(map(same_bits, runner(x), f(x)))


@pytest.mark.parametrize("rows", [1, 40])
def test_threads_share_the_panels_of_all(rows: int) -> None:
    """So much work that a second thread begins within a weight."""
    of = Weights(0, 512)
    sizes = (1000, 96, 3000)
    all_ = [*map(of.int8, sizes), *(of.in_groups(n, 64, "zero") for n in sizes)]
    f = lambda x: [linear(x, w) for w in all_]  # noqa: E731
    x = torch.randn(rows, 512)
    runner = built(f, (x,))
    assert weights_of(runner) == [6]
    with on_threads(2):
        found = runner(x)
    with on_threads(1):
        assert all(map(same_bits, found, f(x)))


def _two(x: Any, y: Any, one: Any, two: Any, between: str) -> Any:
    """What is between two linears of one input, or differs."""
    source = aten.neg.default(x)
    found = [linear(source, one)]
    if between == "a change of it":
        aten.add_.Tensor(source, 1.0)
    if between == "a change of a bias":
        aten.add_.Tensor(y, 1.0)
    if between == "what PyTorch runs":
        found.append(aten.cumsum.default(source, 0))
    if between == "a function":
        found.append(aten.neg.default(found[0]))
    bias = {"a bias": aten.neg.default(y), "a change of a bias": y}.get(between)
    other = aten.neg.default(x) if between == "another input" else source
    how = {"bits": 7} if between == "fewer bits" else {}
    return [*found, linear(other, two, bias, **how)]


@pytest.mark.parametrize(
    ("between", "joined"),
    [
        ("nothing", True),
        ("a function", True),
        ("a change of it", False),
        ("a bias", False),
        ("a change of a bias", False),
        ("what PyTorch runs", False),
        ("another input", False),
        ("fewer bits", False),
    ],
)
def test_what_keeps_them_apart(between: str, joined: bool) -> None:
    of = Weights(0, 64)
    one, two = of.int8(32), of.int8(48)
    x, y = torch.randn(2, 64), torch.randn(48)
    f = lambda x, y: _two(x, y, one, two, between)  # noqa: E731
    runner = built(f, (x, y))
    assert weights_of(runner) == ([2] if joined else [1, 1])
    expected, found = f(x, y.clone()), runner(x, y.clone())
    assert all(map(same_bits, found, expected))


@pytest.mark.parametrize("written", [True, False])
def test_a_cache_that_is_written_between(written: bool) -> None:
    """Its scales, which both linears read, of one text or another."""
    of = Weights(0, 16)
    one, two = of.int8(32), of.int8(48)
    at = torch.tensor([3])

    def f(x: Any, codes: Any, scales: Any, values: Any, others: Any) -> Any:
        read = aten.view.default(scales if written else x, [2, 16])
        found = linear(read, one)
        new = aten.view.default(x, [1, 2, 1, 16])
        ops.kv_write.default(codes, scales, values, others, new, new, at)
        return [found, linear(read, two)]

    def given_anew() -> list[Tensor]:
        return [torch.ones(2, 16), *(part.clone() for part in kv_empty(1, 2, 16, 16))]

    runner = built(f, given_anew())
    assert runner.outside == [] and weights_of(runner) == [1, 1]
    assert all(map(same_bits, runner(*given_anew()), f(*given_anew())))


def test_one_whose_result_alone_is_read() -> None:
    """The first of them is nobody's, and takes no place from the second."""
    of = Weights(0, 64)
    one, two = of.int8(32), of.int8(48)

    def f(x: Any) -> Any:
        linear(x, one)
        return [linear(x, two)]

    x = torch.randn(2, 64)
    runner = built(f, (x,))
    assert weights_of(runner) == [1]
    assert same_bits(runner(x)[0], f(x)[0])
