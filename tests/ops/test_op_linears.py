"""linears: one call gives the bits of one for each weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import qfx._C as _C
from qfx.ops.code import Code
from tests.conftest import on_isa, on_threads, same_bits
from tests.lib.several import Case, Weights, alone, drawn_case, together

ops = torch.ops.qfx
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@given(data=st.data())
def test_they_give_the_bits_of_one_for_each(data: st.DataObject) -> None:
    """On every instruction set, of any type of x, of biases and of results."""
    drawn = drawn_case(data.draw, FLOATS)
    for isa in _C.isas():
        with on_isa(isa), on_threads(data.draw(st.sampled_from([1, 2]))):
            found, expected = together(drawn), alone(drawn)
            assert all(map(same_bits, found, expected)), isa


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("most", [(63, 127), (127, 63)])
def test_small_and_large_codes(most: tuple[int, int], rows: int, isa: str) -> None:
    """Kernels read inputs in another format where all codes of a weight are at most 63."""
    of = Weights(2, 192)
    weights = tuple(of.int8(n, limit) for n, limit in zip((32, 48), most, strict=True))
    case = Case(torch.randn(rows, 192, generator=of.g), weights, list(Code()))
    assert all(map(same_bits, together(case), alone(case)))


def test_strided_operands() -> None:
    of = Weights(0, 64)
    wide, biases = torch.randn(3, 128, generator=of.g), torch.randn(48, 2, generator=of.g)
    weights = (of.int8(48)._replace(bias=biases[:, 0]), of.int8(48)._replace(bias=biases[:, 1]))
    case = Case(wide[:, ::2], weights, list(Code()), wide[0, 1::2].exp())
    assert all(map(same_bits, together(case), alone(case)))


OF = Weights(1, 64)
TWO = (OF.int8(32), OF.int8(48))
CASE = Case(torch.randn(3, 64, generator=OF.g), TWO, list(Code()))


def _call(**other: Any) -> Any:
    how = {
        "x": CASE.x, "weight": [w.packed for w in TWO],
        "layout": [*TWO[0].layout, *TWO[1].layout], "bias": [None, None], "code": CASE.code,
        "activation": ["none", "relu"], "out_dtype": torch.float32,
    }  # fmt: skip
    return ops.linears.default(**{**how, **other})


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"layout": [*TWO[0].layout]}, "2 weights, but 5 numbers of layouts, 2 biases and 2 activ"),
        ({"bias": [None]}, "1 biases and 2 activations, expected five numbers for each weight"),
        ({"activation": ["none"] * 3}, "2 biases and 3 activations"),
        ({"weight": [TWO[0].packed, OF.int8(48).packed[:7]]}, "weight"),
        ({"weight": [w.packed for w in TWO[::-1]]}, "N=32 is asked for but the weight was packed"),
        ({"bias": [None, torch.ones(32)]}, "bias has shape 32, expected 48"),
        ({"activation": ["none", "swish"]}, "swish"),
        ({"x": CASE.x[:, :32]}, "x has K=32 (shape 3x32) but the weight was packed for K=64"),
        ({"code": list(Code(group=32))}, "group=32, but the weight was packed in one group"),
        ({"factor": torch.ones(3)}, "factor"),
    ],
)
def test_a_call_that_is_refused(other: dict[str, Any], said: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        _call(**other)
    assert "linears" in str(caught.value) and said in str(caught.value)


def test_of_no_weight_at_all() -> None:
    assert _call(weight=[], layout=[], bias=[], activation=[]) == []


def test_a_bias_that_records_gradients_is_told_of_at_the_backward() -> None:
    """Though it is in a list, where autograd does not look for tensors."""
    bias = torch.ones(48, requires_grad=True)
    found = _call(bias=[None, bias])
    assert found[1].requires_grad and torch.equal(found[0], _call()[0])
    with pytest.raises(NotImplementedError, match="qfx::linears is an inference operator"):
        found[1].sum().backward()
