"""Linears of a program give the bits of their operators, on every instruction set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import qfx._C as _C
from qfx.graph.activations import ACTIVATIONS
from qfx.ops.code import Code
from qfx.ops.layout import Layout
from tests.lib.strategies import BITS, SEEDS
from tests.programs.traced import aten, built, same_bits

ops = torch.ops.qfx
F32 = torch.float32
K = st.sampled_from([1, 5, 16, 64, 100, 192])
N = st.sampled_from([1, 31, 33, 64])
ROWS = st.sampled_from([[], [1], [3], [2, 5], [17], [0], [2, 0, 3]])


@pytest.fixture(autouse=True)
def _isa() -> Iterator[None]:
    before = _C.isa()
    yield
    _C.set_isa(before)


class _Drawn:
    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self.generator = torch.Generator().manual_seed(draw(SEEDS))
        self.k, self.n = draw(K), draw(N)
        self.sizes = [*draw(ROWS), self.k]
        self.weight, self.layout = self._weight(draw)
        self.activation = draw(st.sampled_from(list(ACTIVATIONS)))
        group = draw(st.sampled_from([0, self.layout.group]))
        per_tensor = 0 if group else draw(st.sampled_from([0, 1]))
        rotation = draw(st.sampled_from([0, *(r for r in (16, 64) if self.k % r == 0)]))
        self.code = list(Code(draw(BITS), int(draw(st.booleans())), per_tensor, group, rotation))
        self.factor = self.randn(self.k).abs() + 0.5 if draw(st.booleans()) else None
        self.bias = self.randn(self.n) if draw(st.booleans()) else None
        self.x = self.randn(*self.sizes)

    def randn(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=self.generator)

    def codes(self, low: int, high: int, *sizes: int) -> Tensor:
        return torch.randint(low, high + 1, sizes, generator=self.generator, dtype=torch.int8)

    def _weight(self, draw: Callable[[Any], Any]) -> tuple[Tensor, Layout]:
        """Of any layout, as `ops.pack_weight` makes it."""
        bits = draw(st.sampled_from([8, 8, 4, 5]))
        group = draw(st.sampled_from([0, 32, 64, 128] if bits == 8 else [32, 64, 128]))
        shift = draw(st.sampled_from(["none", "zero"] if bits == 8 else ["none", "zero", "least"]))
        scale_group = group if bits < 8 or draw(st.booleans()) else 0
        each = (self.n, -(-self.k // scale_group) if scale_group else 1)
        low, high = -(1 << bits - 1), (1 << bits - 1) - 1
        scale = self.randn(*each).abs().add(0.5).bfloat16().float()
        zero = self.codes(low, high, *each).int() if shift == "zero" else None
        least = self.randn(*each).bfloat16().float() if shift == "least" else None
        codes = self.codes(low, high, self.n, self.k)
        weight = ops.pack_weight.default(codes, scale, zero, least, bits, group)
        return weight, Layout(self.n, bits, group, scale_group, int(shift != "none"))

    @property
    def end(self) -> tuple[Any, ...]:
        return self.weight, list(self.layout), self.bias


def _check(f: Callable[[Any], Any], x: Tensor) -> None:
    runner = built(f, (x,))
    for isa in _C.isas():
        _C.set_isa(isa)
        (found,), expected = runner(x), f(x)
        assert same_bits(found, expected), (isa, (found - expected).abs().max())
    assert runner.outside == []


@given(data=st.data())
def test_a_linear_gives_the_operators_bits(data: st.DataObject) -> None:
    d = _Drawn(data.draw)
    _check(
        lambda x: ops.linear_dynamic.default(x, *d.end, d.code, d.activation, F32, d.factor), d.x
    )


ROW, END = list(Code()), (list(Layout(32)), None)


def _fixed() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    w = torch.randint(-127, 128, (32, 64), generator=generator, dtype=torch.int8)
    x = torch.randn(4, 64, generator=generator)
    return x, ops.pack_weight.default(w, torch.rand(32, generator=generator))


def _linear(x: Any, weight: Any, activation: str = "none") -> Any:
    return ops.linear_dynamic.default(x, weight, *END, ROW, activation, F32)


def _of_codes(codes: Any, weight: Any) -> Any:
    return ops.linear.default(codes[0], codes[1], codes[2], weight, *END, "none", F32)


@pytest.mark.parametrize("name", [name for name, row in ACTIVATIONS.items() if row.spelled])
def test_the_activation_behind_a_linear_is_its_epilogue(name: str) -> None:
    (x, weight), row = _fixed(), ACTIVATIONS[name]
    runner = built(lambda a: row.spelled[-1](_linear(a, weight), **row.settings), (x,))
    assert same_bits(runner(x)[0], _linear(x, weight, name)) and runner.outside == []


def test_an_activation_is_kept_where_its_linear_is_not_in_the_program() -> None:
    x, weight = _fixed()

    def f(a: Any) -> Any:
        return aten.relu.default(_linear(aten._to_copy.default(a, dtype=torch.bfloat16), weight))

    runner = built(f, (x,))
    assert same_bits(runner(x)[0], f(x))
    assert "qfx.linear_dynamic.default" in runner.outside


def test_a_weight_that_a_graph_is_given_is_pytorchs() -> None:
    x, weight = _fixed()
    f = lambda a, w: aten.relu.default(_linear(a, w))  # noqa: E731
    runner = built(f, (x, weight))
    assert same_bits(runner(x, weight)[0], f(x, weight))
    assert runner.outside == ["qfx.linear_dynamic.default"]


def test_codes_that_others_make_are_pytorchs() -> None:
    """Fusing leaves none where a linear could quantize for itself."""
    x, weight = _fixed()
    f = lambda a: _of_codes(ops.quantize.default(a, ROW), weight)  # noqa: E731
    runner = built(f, (x,))
    assert same_bits(runner(x)[0], f(x))
    assert runner.outside == ["qfx.quantize.default", "qfx.linear.default"]


def test_a_damaged_weight_is_refused() -> None:
    x, weight = _fixed()
    damaged = weight.clone()
    damaged[-1] ^= 1
    with pytest.raises(ValueError, match="it is damaged"):
        built(lambda a: _linear(a, damaged), (x,))
