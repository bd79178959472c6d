"""Attention to all keys in a program: the bits of the operator in int8; in float within the bound
of (A10), and the same bits on every instruction set and for any number of threads."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import qfx._C as _C
from tests.conftest import on_isa, on_threads
from tests.programs.traced import aten, built, same_bits

ops = torch.ops.qfx
HALF = 2.0**-24


class Drawn(NamedTuple):
    """Operands [B, T, H, D], of which attention gets [B, H, T, D]; the mask may be None."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    scale: float
    causal: bool

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (*self[:3], *([] if self.mask is None else [self.mask]))


@st.composite
def drawn(draw: st.DrawFn, float_masks: bool = True) -> Drawn:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    batch, heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    m, n = draw(st.integers(1, 60)), draw(st.integers(1, 70))
    d, e = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    shapes = (batch, m, heads * group, d), (batch, n, heads, d), (batch, n, heads, e)
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    causal, mask = draw(st.booleans()), None
    if not causal and draw(st.booleans()):
        shape = [draw(st.sampled_from([1, batch])), 1, draw(st.sampled_from([1, m])), n]
        mask = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.3, 0.9, 1.0]))
        if float_masks and draw(st.booleans()):
            mask = torch.where(mask, torch.randn(shape, generator=generator), -math.inf)
    return Drawn(q, k, v, mask, draw(st.sampled_from([0.125, 1.0])), causal)


def _heads(x: Any) -> Any:
    return aten.transpose.int(x, 1, 2)


def _float(case: Drawn) -> Any:
    grouped = case.q.shape[2] != case.k.shape[2]

    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return aten.scaled_dot_product_attention.default(
            *map(_heads, (q, k, v)), mask, 0.0, case.causal, scale=case.scale, enable_gqa=grouped
        )

    if case.mask is None:
        return lambda q, k, v: attend(q, k, v, None)
    return attend


def _int8(case: Drawn) -> Any:
    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        rest = (mask, case.scale, case.causal, torch.float32)
        return ops.int8_attention.default(*map(_heads, (q, k, v)), *rest)

    if case.mask is None:
        return lambda q, k, v: attend(q, k, v, None)
    return attend


def _expected(case: Drawn) -> tuple[Tensor, Tensor]:
    """Returns the exact attention in float64, and how far (A10) may be from it."""
    q, k, v = (_heads(x).double() for x in case[:3])
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    n, d = k.shape[-2:]
    added = torch.zeros((), dtype=torch.float64)
    if case.mask is not None:
        hidden = case.mask.double().log() if case.mask.dtype == torch.bool else case.mask.double()
        added = hidden
    if case.causal:
        added = torch.ones(q.shape[-2], n, dtype=torch.float64).tril().log()
    t = q @ k.mT * case.scale + added
    y = t.softmax(-1).nan_to_num(0) @ v
    seen = added.expand_as(t) != -math.inf
    sizes = q.abs() @ k.abs().mT * case.scale + added.expand_as(t).masked_fill(~seen, 0).abs()
    e = ((d / 2 + 8) * HALF * sizes).masked_fill(~seen, 0).amax(-1, keepdim=True)
    most = t.masked_fill(~seen, 0).abs().amax(-1, keepdim=True)
    power = 2 * e + (4 * most + 2 * n + 16) * HALF
    return y, v.abs().amax((-2, -1), keepdim=True) * (torch.expm1(power) + n * math.exp(-80))


@settings(max_examples=max(settings().max_examples // 2, 20))
@given(drawn())
def test_in_float_it_is_near_the_exact_one(case: Drawn) -> None:
    runner = built(_float(case), case.inputs)
    assert runner.outside == []
    (found,) = runner(*case.inputs)
    y, bound = _expected(case)
    assert bool(((found.double() - y).abs() <= bound).all())
    for isa in _C.isas():
        for threads in (1, 3):
            with on_isa(isa), on_threads(threads):
                assert same_bits(runner(*case.inputs)[0], found), (isa, threads)


@settings(max_examples=max(settings().max_examples // 2, 20))
@given(drawn(), st.sampled_from([1, 2]))
def test_in_int8_it_gives_the_bits_of_the_operator(case: Drawn, threads: int) -> None:
    runner = built(_int8(case), case.inputs)
    assert runner.outside == []
    expected = _int8(case)(*case.inputs)
    with on_threads(threads):
        assert same_bits(runner(*case.inputs)[0], expected)


def test_a_row_that_sees_no_key_is_zero() -> None:
    q = torch.randn(1, 2, 1, 16)
    mask = torch.tensor([[True, True], [False, False]]).view(1, 1, 2, 2)
    case = Drawn(q, q, q, mask, 0.25, False)
    (y,) = built(_float(case), case.inputs)(*case.inputs)
    assert not y[0, 0, 1].any() and y[0, 0, 0].all()


@pytest.mark.parametrize("where", ["q", "k"])
def test_a_nan_shows_in_the_rows_that_see_it(where: str) -> None:
    case = Drawn(*(torch.randn(1, 7, 1, 16) for _ in range(3)), None, 0.25, True)
    getattr(case, where)[0, 3] = math.nan
    (y,) = built(_float(case), case.inputs)(*case.inputs)
    assert bool(y[0, 0, 3].isnan().all()) and not bool(y[0, 0, :3].isnan().any())
    assert bool(y[0, 0, 4:].isnan().all()) == (where != "q")
