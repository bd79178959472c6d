"""Linears of a program give the bits of their operators, on every instruction set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import qfx._C as _C
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qfx.ops.activations import ACTIVATIONS
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
        self.axes = draw(st.sampled_from([[1], [0, 1]]))
        self.bits, self.symmetric = draw(BITS), draw(st.booleans())
        self.activation = draw(st.sampled_from(list(ACTIVATIONS)))
        whole = [r for r in (16, 64) if self.k % r == 0]
        self.rotation = draw(st.sampled_from([0, *whole]))
        self.factor = self.randn(self.k).abs() + 0.5 if draw(st.booleans()) else None
        self.bias = self.randn(self.n) if draw(st.booleans()) else None
        self.x = self.randn(*self.sizes)

    def randn(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=self.generator)

    def codes(self, low: int, high: int, *sizes: int) -> Tensor:
        return torch.randint(low, high + 1, sizes, generator=self.generator, dtype=torch.int8)

    def weight(self) -> tuple[Tensor, Tensor]:
        packed = ops.pack_weight.default(self.codes(-127, 127, self.n, self.k))
        return packed, self.randn(self.n).abs()

    def how(self) -> tuple[Any, ...]:
        return self.axes, self.bits, self.symmetric

    def transform(self) -> dict[str, Any]:
        return {"factor": self.factor, "rotation": self.rotation}


def _check(f: Callable[[Any], Any], x: Tensor) -> None:
    runner = built(f, (x,))
    for isa in _C.isas():
        _C.set_isa(isa)
        (found,), expected = runner(x), f(x)
        assert same_bits(found, expected), (isa, (found - expected).abs().max())
    assert runner.outside == []


def _dynamic(d: _Drawn) -> Callable[[Any], Any]:
    packed, w_scale = d.weight()
    return lambda x: ops.int8_linear_dynamic.default(
        x, packed, w_scale, d.bias, *d.how(), d.activation, F32, **d.transform()
    )


def _shared(d: _Drawn) -> Callable[[Any], Any]:
    packed, w_scale = d.weight()

    def f(x: Any) -> Any:
        codes = ops.quantize.default(x, *d.how(), **d.transform())
        parts = codes[0], codes[1], codes[2]
        return ops.int8_linear.default(*parts, packed, w_scale, d.bias, d.activation, F32)

    return f


def _lowbit(d: _Drawn, draw: Callable[[Any], Any]) -> tuple[Tensor, int, int]:
    w_bits, group = draw(st.sampled_from([4, 5])), draw(st.sampled_from([32, 64, 128]))
    shift = draw(st.sampled_from(["none", "zero", "minimum"]))
    low, high = -(1 << w_bits - 1), (1 << w_bits - 1) - 1
    groups = -(-d.k // group)
    scale = d.randn(d.n, groups).abs().add(0.5).bfloat16().float()
    zero = d.codes(low, high, d.n, groups).int() if shift == "zero" else None
    minimum = d.randn(d.n, groups).bfloat16().float() if shift == "minimum" else None
    codes = d.codes(low, high, d.n, d.k)
    return ops.pack_lowbit.default(codes, scale, zero, minimum, w_bits, group), w_bits, group


def _few_bits(d: _Drawn, draw: Callable[[Any], Any]) -> Callable[[Any], Any]:
    packed, w_bits, w_group = _lowbit(d, draw)
    group = draw(st.sampled_from([0, w_group]))
    return lambda x: ops.lowbit_linear_dynamic.default(
        x, packed, d.n, w_bits, w_group, d.bias, d.axes, group, d.bits, d.symmetric, d.activation,
        F32, **d.transform(),
    )  # fmt: skip


def _few_bits_shared(d: _Drawn, draw: Callable[[Any], Any]) -> Callable[[Any], Any]:
    packed, w_bits, w_group = _lowbit(d, draw)
    grouped = draw(st.booleans())

    def f(x: Any) -> Any:
        if grouped:
            how = w_group, d.bits, d.symmetric
            codes = ops.quantize_groups.default(x, *how, **d.transform())
        else:
            codes = ops.quantize.default(x, *d.how(), **d.transform())
        parts = codes[0], codes[1], codes[2]
        return ops.lowbit_linear.default(
            *parts, packed, d.n, w_bits, w_group, d.bias, d.activation, F32
        )

    return f


@settings(max_examples=max(settings().max_examples // 2, 10))
@given(data=st.data())
@pytest.mark.parametrize("make", [_dynamic, _shared, _few_bits, _few_bits_shared])
def test_a_linear_gives_the_operators_bits(make: Callable[..., Any], data: st.DataObject) -> None:
    d = _Drawn(data.draw)
    f = make(d) if make in (_dynamic, _shared) else make(d, data.draw)
    _check(f, d.x)


def _fixed() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    w = torch.randint(-127, 128, (32, 64), generator=generator, dtype=torch.int8)
    x = torch.randn(4, 64, generator=generator)
    return x, ops.pack_weight.default(w), torch.rand(32, generator=generator)


def _linear(x: Any, packed: Any, w_scale: Any, dtype: torch.dtype = F32) -> Any:
    how = ([1], 8, True, "none", dtype)
    return ops.int8_linear_dynamic.default(x, packed, w_scale, None, *how)


SPELLED = {
    "relu": lambda y: aten.relu.default(y),
    "silu": lambda y: aten.silu.default(y),
    "gelu": lambda y: aten.gelu.default(y),
    "gelu_tanh": lambda y: aten.gelu.default(y, approximate="tanh"),
}


@pytest.mark.parametrize("name", SPELLED)
def test_the_activation_behind_a_linear_is_its_epilogue(name: str) -> None:
    x, packed, w_scale = _fixed()
    runner = built(lambda a: SPELLED[name](_linear(a, packed, w_scale)), (x,))
    expected = ops.int8_linear_dynamic.default(x, packed, w_scale, None, [1], 8, True, name, F32)
    assert same_bits(runner(x)[0], expected) and runner.outside == []


def test_an_activation_is_kept_where_its_linear_is_not_in_the_program() -> None:
    x, packed, w_scale = _fixed()

    def f(a: Any) -> Any:
        half = aten._to_copy.default(a, dtype=torch.bfloat16)
        return aten.relu.default(_linear(half, packed, w_scale))

    runner = built(f, (x,))
    assert same_bits(runner(x)[0], f(x))
    assert "qfx.int8_linear_dynamic.default" in runner.outside


def test_a_weight_that_a_graph_is_given_is_pytorchs() -> None:
    x, packed, w_scale = _fixed()
    f = lambda a, w: aten.relu.default(_linear(a, w, w_scale))  # noqa: E731
    runner = built(f, (x, packed))
    assert same_bits(runner(x, packed)[0], f(x, packed))
    assert runner.outside == ["qfx.int8_linear_dynamic.default"]


def _changed_between(x: Any, y: Any, w: Any, w_scale: Any, into: str) -> Any:
    source = aten.neg.default(x)
    read = {"x": x, "its own": source}[into if into != "y" else "x"]
    q = ops.quantize.default(read, [1], 8, True)
    aten.add_.Tensor({"x": x, "y": y, "its own": source}[into], 3.0)
    return ops.int8_linear.default(q[0], q[1], q[2], w, w_scale, None, "none", F32)


@pytest.mark.parametrize("into", ["x", "y", "its own"])
def test_codes_are_of_what_was_there(into: str) -> None:
    """A linear that would quantize what was written since, directly or through another input."""
    x, packed, w_scale = _fixed()
    f = lambda a, b: _changed_between(a, b, packed, w_scale, into)  # noqa: E731
    runner = built(f, (x, x.clone()))
    shared, also = x.clone(), x.clone()
    pair = (shared, shared) if into == "y" else (shared, x.clone())
    expected = (also, also) if into == "y" else (also, x.clone())
    assert same_bits(runner(*pair)[0], f(*expected))


def test_codes_that_a_graph_is_given_are_not_quantized_again() -> None:
    x, packed, w_scale = _fixed()
    q, scale, zero = ops.quantize.default(x, [1], 8, True)
    f = lambda *codes: ops.int8_linear.default(*codes, packed, w_scale, None, "none", F32)  # noqa: E731
    runner = built(lambda q, s, z: f(q, s, z), (q, scale, zero))
    assert same_bits(runner(q, scale, zero)[0], f(q, scale, zero))

    def cloned(a: Any) -> Any:
        c = ops.quantize.default(a, [1], 8, True)
        return f(aten.clone.default(c[0]), c[1], c[2])

    assert same_bits(built(cloned, (x,))(x)[0], f(q, scale, zero))


def test_several_linears_share_what_they_quantize() -> None:
    x, packed, w_scale = _fixed()

    def f(a: Any) -> Any:
        y = aten.sigmoid.default(a)
        c = ops.quantize.default(y, [0, 1], 7, False)
        one, two = (
            ops.int8_linear.default(c[0], c[1], c[2], packed, w_scale, None, how, F32)
            for how in ("none", "relu")
        )
        return aten.sub.Tensor(one, two)

    runner = built(f, (x,))
    assert runner.outside == []
    assert torch.allclose(runner(x)[0], f(x), 1e-4, 1e-4)


def test_a_damaged_weight_is_refused() -> None:
    x, _, w_scale = _fixed()
    damaged = ops.pack_weight.default(torch.full((32, 64), 77, dtype=torch.int8)).clone()
    damaged[-1] ^= 1
    with pytest.raises(ValueError, match="it is damaged"):
        built(lambda a: _linear(a, damaged, w_scale), (x,))
