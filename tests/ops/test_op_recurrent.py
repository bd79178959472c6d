"""lstm and gru: a step has the bits of its linear and its gates, steps those of calls one by one,
and packed sequences those of each alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import qfx._C as _C
from qfx.ops.code import Code
from qfx.ops.layout import Layout
from qfx.ops.recurrent import exact_sigmoid, exact_tanh
from qfx.ops.weight_values import weight_values
from tests.conftest import on_isa, on_threads, same_bits
from tests.lib.several import Weights

ops = torch.ops.qfx
F32 = torch.float32


class Layer(NamedTuple):
    """Arguments of `lstm`, or of `gru`, whose state has no c."""

    x: Tensor
    weight: Tensor
    layout: list[int]
    bias: Tensor | None
    state: tuple[Tensor, ...]
    code: list[int]
    reverse: bool = False
    sizes: Tensor | None = None

    def run(self) -> tuple[Tensor, ...]:
        op = ops.lstm.default if len(self.state) == 2 else ops.gru.default
        how = (self.weight, self.layout, self.bias, *self.state, self.code, self.reverse)
        result: tuple[Tensor, ...] = op(self.x, *how, self.state[0].dtype, self.sizes)
        return result

    @property
    def gates(self) -> int:
        return 4 if len(self.state) == 2 else 3

    def step(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Returns the state after one step, of the operator for one linear and gates in Python."""
        h = state[0]
        how = (self.weight, self.layout, self.bias, self.code, "none", F32)
        r = ops.linear_dynamic.default(h, *how)
        if self.gates == 4:
            i, f, g, o = (x.float() + r).chunk(4, 1)
            c = exact_sigmoid(f) * state[1].float() + exact_sigmoid(i) * exact_tanh(g)
            return (exact_sigmoid(o) * exact_tanh(c)).to(h.dtype), c
        (x_r, x_z, x_n), (h_r, h_z, h_n) = x.float().chunk(3, 1), r.chunk(3, 1)
        n = exact_tanh(x_n + exact_sigmoid(x_r + h_r) * h_n)
        return ((n + exact_sigmoid(x_z + h_z) * (h.float() - n)).to(h.dtype),)


FORMS = ("int8", "groups", "4 bits", "zero points")


def layer(
    gates: int, size: int, steps: int, batch: int, form: str = "int8", seed: int = 0, **more: Any
) -> Layer:
    of = Weights(seed, size)
    if form == "int8":
        weight, layout, *_ = of.int8(gates * size)
    else:
        bits, group, shift = {
            "groups": (8, 64, "none"), "4 bits": (4, 32, "minimum"), "zero points": (8, 32, "zero"),
        }[form]  # fmt: skip
        weight, layout, *_ = of.in_groups(gates * size, group, shift, bits)
    dtype = more.pop("dtype", F32)
    h, c = torch.randn(2, batch, size, generator=of.g)
    x = 2 * torch.randn(steps, batch, gates * size, generator=of.g)
    bias = torch.randn(gates * size, generator=of.g) if more.pop("bias", True) else None
    state = (h.to(dtype), c) if gates == 4 else (h.to(dtype),)
    code = more.pop("code", [*Code(8, 0)])
    return Layer(x.to(dtype), weight, [*layout], bias, state, code, **more)


@st.composite
def layers(draw: Any) -> Layer:
    size = draw(st.sampled_from([1, 31, 64, 100]))
    rotation = draw(st.sampled_from([0, 64])) if size % 64 == 0 else 0
    return layer(
        draw(st.sampled_from([3, 4])), size, draw(st.integers(0, 4)), draw(st.integers(0, 5)),
        draw(st.sampled_from(FORMS)), draw(st.integers(0, 99)),
        dtype=draw(st.sampled_from([F32, torch.bfloat16, torch.float16])),
        bias=draw(st.booleans()), reverse=draw(st.booleans()),
        code=[*Code(8, draw(st.integers(0, 1)), rotation=rotation)],
    )  # fmt: skip


@given(given=layers())
def test_a_step_has_the_bits_of_its_linear_and_its_gates(given: Layer) -> None:
    """The state c is not rounded between steps. On every instruction set, with one thread or
    two."""
    state, found = given.state, []
    for x in given.x.flip(0) if given.reverse else given.x:
        state = given.step(x, state)
        found.append(state[0])
    y = torch.stack(found[::-1] if given.reverse else found) if found else given.x[..., :0]
    for isa in _C.isas():
        for threads in (1, 2):
            with on_isa(isa), on_threads(threads):
                got, *last = given.run()
                assert not found or same_bits(got, y), (isa, threads)
                for a, b in zip(last, state, strict=True):
                    assert same_bits(a, b.to(a.dtype)), (isa, threads)


@given(given=layers(), cut=st.integers(0, 4))
def test_steps_may_be_divided_among_calls(given: Layer, cut: int) -> None:
    """In float32; otherwise the state c is rounded where a call ends."""
    given = given._replace(reverse=False, state=tuple(t.float() for t in given.state))
    y, *last = given.run()
    first, *state = given._replace(x=given.x[:cut]).run()
    second, *end = given._replace(x=given.x[cut:], state=tuple(state)).run()
    assert same_bits(torch.cat([first, second]), y)
    assert all(same_bits(a, b) for a, b in zip(last, end, strict=True))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("gates", [3, 4])
def test_a_packed_sequence_has_the_bits_of_each_alone(gates: int, reverse: bool) -> None:
    lengths = [4, 3, 3, 1]
    whole = layer(gates, 40, 4, 4, reverse=reverse)
    packed = torch.nn.utils.rnn.pack_padded_sequence(whole.x, torch.tensor(lengths))
    y, *last = whole._replace(x=packed.data, sizes=packed.batch_sizes).run()
    again = torch.nn.utils.rnn.PackedSequence(y, packed.batch_sizes)
    padded, _ = torch.nn.utils.rnn.pad_packed_sequence(again)
    for b, length in enumerate(lengths):
        state = tuple(t[b : b + 1] for t in whole.state)
        one, *end = whole._replace(x=whole.x[:length, b : b + 1], state=state).run()
        assert same_bits(padded[:length, b : b + 1], one)
        assert all(same_bits(a[b : b + 1], e) for a, e in zip(last, end, strict=True))


@pytest.mark.parametrize("gates", [3, 4])
def test_a_step_is_that_of_torch_in_float64(gates: int) -> None:
    """Of the codes of h and the dequantized weight; products and gates round in float32."""
    size, given = 48, layer(gates, 48, 1, 7)
    h, *c = given.state
    w = weight_values(given.weight, given.layout, size, F32).double()
    q, scale, zero = ops.quantize.default(h, given.code)
    h_hat = (q.double() - zero) * scale.double()
    zeros = torch.zeros(gates * size, dtype=torch.float64)
    x = given.x[0].double()
    r = h_hat @ w.t() + given.bias.double() if given.bias is not None else h_hat @ w.t()
    if gates == 4:
        i, f, g, o = (x + r).chunk(4, 1)
        expected = o.sigmoid() * (f.sigmoid() * c[0].double() + i.sigmoid() * g.tanh()).tanh()
    else:
        (x_r, x_z, x_n), (h_r, h_z, h_n) = x.chunk(3, 1), r.chunk(3, 1)
        n = (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
        expected = n + (x_z + h_z).sigmoid() * (h.double() - n)
    # of x + r: that of r, whose scales round too, then of the sum; gates have slopes of at most 1,
    # what multiplies c at most |c|, and each function errs by at most 4 * 2^-24
    sums = 8 * 2.0**-24 * (x.abs() + r.abs() + zeros).amax()
    most = 1 + max(t.abs().amax().item() for t in given.state)
    y = given.run()[0][0]
    assert ((y.double() - expected).abs() <= 4 * most * (sums + 8 * 2.0**-24)).all()


def test_gates_err_by_little_on_a_dense_sweep() -> None:
    """Measured 1.5 and 3 times 2^-24. The kernels have these bits: the laws above."""
    v = torch.cat([torch.linspace(-110, 110, 100001), torch.linspace(-4, 4, 100001)]).float()
    for found, expected in ((exact_sigmoid, torch.sigmoid), (exact_tanh, torch.tanh)):
        assert ((found(v).double() - expected(v.double())).abs() <= 4 * 2.0**-24).all()


@pytest.mark.parametrize("gates", [3, 4])
def test_rows_that_are_not_finite_spoil_no_other(gates: int) -> None:
    whole = layer(gates, 40, 3, 3)
    h = whole.state[0].clone()
    h[1, 5] = torch.nan
    y, *_ = whole._replace(state=(h, *whole.state[1:])).run()
    expected, *_ = whole.run()
    assert y[:, 1].isnan().all() and same_bits(y[:, ::2], expected[:, ::2])


ERRORS = {
    "x has shape 3x2x15, expected 20 columns": {"x": torch.zeros(3, 2, 15)},
    "x has shape 3x4x20 and h 2x5, expected steps of a row for each row of h": {
        "x": torch.zeros(3, 4, 20)
    },
    "the weight has N=15 and K=5, expected N=20": {
        "weight": Weights(0, 5).int8(15).packed, "layout": [*Layout(15)],
    },
    "h has 2 rows and c 3": {"state": (torch.zeros(2, 5), torch.zeros(3, 5))},
    "c has shape 2x4, expected two dimensions, the second of 5": {
        "state": (torch.zeros(2, 5), torch.zeros(2, 4))
    },
    "batch_sizes has 3 after 2": {
        "x": torch.zeros(5, 20), "sizes": torch.tensor([2, 3]),
    },
    "x has 5 rows and batch_sizes 4": {"x": torch.zeros(5, 20), "sizes": torch.tensor([2, 2])},
    "code has one scale for all rows, expected one for each": {"code": [*Code(8, 0, 1)]},
    "bias has shape 19": {"bias": torch.zeros(19)},
}  # fmt: skip


@pytest.mark.parametrize("sentence", ERRORS)
def test_wrong_arguments_are_refused_with_numbers(sentence: str) -> None:
    wrong = layer(4, 5, 3, 2)._replace(**ERRORS[sentence])
    with pytest.raises(RuntimeError, match=sentence):
        wrong.run()


def test_h_of_another_dtype_is_refused() -> None:
    given = layer(3, 5, 3, 2)
    how = (given.weight, given.layout, None, *given.state, given.code, False, torch.bfloat16)
    with pytest.raises(RuntimeError, match="h is Float and out_dtype BFloat16, expected the same"):
        ops.gru.default(given.x, *how)
