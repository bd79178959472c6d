"""Linears of 8-bit weights in groups, and operands in groups: laws beyond the table. (E3)"""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import qfx
from qfx.ops.code import Code
from qfx.ops.layout import Layout
from tests.conftest import on_isa, same_bits
from tests.lib.strategies import BITS, FINITE, ISAS, POSITIVE, SEEDS, filled, step_error

OPS = torch.ops.qfx
GROUPS = st.sampled_from([0, 32, 64, 96, 128, 640])
WHOSE = st.sampled_from(["x", "w", "xw"])  # groups
DEPTHS = st.sampled_from([1, 63, 64, 65, 130, 200, 500, 1100])
TAIL = (None, "none", torch.float32)


ASYMMETRIC = Code(symmetric=0)


def in_groups(w: Tensor, group: int, bits: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K], scale and zero point [N, G]."""
    return qfx.quantize(w, qfx.QSpec(bits=bits, symmetric=symmetric, group=group))[:3]


def packed(
    codes: Tensor, scale: Tensor, zero: Tensor | None, group: int
) -> tuple[Tensor, list[int]]:
    """A weight and its layout. `group`: of its sums."""
    n, k = codes.shape
    scale_group = group if scale.shape[1] > 1 or k <= group else 0
    layout = [n, 8, group, scale_group, int(zero is not None)]
    return OPS.pack_weight(codes, scale, zero, None, 8, group), layout


def _in_k(values_ng: Tensor, group: int, k: int) -> Tensor:
    """Values of groups [N, G] as values of elements [N, K]."""
    return values_ng.repeat_interleave(group or max(k, 1), 1)[:, :k]


@given(POSITIVE, DEPTHS, GROUPS, BITS, st.booleans(), st.sampled_from(FINITE), SEEDS)
def test_each_group_is_quantized_by_itself(
    n: int, k: int, group: int, bits: int, symmetric: bool, fill: str, seed: int
) -> None:
    w = filled(fill, n, k, torch.Generator().manual_seed(seed))
    q, scale, zero = in_groups(w, group, bits, symmetric)
    step = group or k
    assert q.shape == (n, k) and scale.shape == zero.shape == (n, -(-k // step))
    for g in range(scale.shape[1]):
        inside = slice(g * step, (g + 1) * step)
        alone = OPS.quantize(w[:, inside].contiguous(), Code(bits, int(symmetric)))
        here = (q[:, inside], scale[:, g : g + 1], zero[:, g : g + 1])
        assert all(same_bits(h.contiguous(), a) for h, a in zip(here, alone, strict=True))


@given(
    ISAS, POSITIVE, DEPTHS, POSITIVE, GROUPS, WHOSE, BITS, st.booleans(),
    st.sampled_from(("normal", "equal", "zero_rows", "one_sided", "outlier")), SEEDS,
)  # fmt: skip
def test_is_within_the_bound_of_its_operands(
    isa: str, m: int, k: int, n: int, group: int, whose: str, bits: int, symmetric: bool, fill: str,
    seed: int,
) -> None:  # fmt: skip
    """(B2) with a step for each group, and the roundings of (E3): G + 3 of each term."""
    generator = torch.Generator().manual_seed(seed)
    x, w = (filled(fill, rows, k, generator) for rows in (m, n))
    x_group, w_group = (group if operand in whose else 0 for operand in "xw")
    q, scale, zero = in_groups(x, x_group, 8, False)
    w_q, w_scale, w_zero = in_groups(w, w_group, bits, symmetric)
    weight = packed(w_q, w_scale, None if symmetric else w_zero, group)
    with on_isa(isa):
        y = OPS.linear(q, scale, zero, *weight, *TAIL)
        if x_group:
            code = ASYMMETRIC._replace(group=group)
            assert same_bits(y, OPS.linear_dynamic(x, *weight, None, code, *TAIL[1:]))
    size_x, size_w = x.double().abs(), w.double().abs()
    error_x = _in_k(step_error(scale, 8, False), x_group, k)
    error_w = _in_k(step_error(w_scale, bits, symmetric), w_group, k)
    bound = size_x @ error_w.t() + error_x @ size_w.t() + error_x @ error_w.t()
    most = (size_x + error_x) @ (size_w + error_w).t()
    bound += (-(-k // (group or k)) + 3) * 2.0**-24 * 1.01 * most
    assert ((y.double() - x.double() @ w.double().t()).abs() <= bound).all()


@given(ISAS, POSITIVE, DEPTHS, POSITIVE, SEEDS)
def test_one_group_is_one_scale(isa: str, m: int, k: int, n: int, seed: int) -> None:
    """The same bits as one exact product (E1), for groups of no operand but zero points that are
    0, of x, and of both."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator)
    codes = OPS.quantize(x, ASYMMETRIC)
    w = torch.randint(-128, 128, (n, k), generator=generator, dtype=torch.int8)
    w_scale, whole = torch.rand(n, 1, generator=generator), -(-k // 32) * 32
    with on_isa(isa):
        found = OPS.linear(*codes, OPS.pack_weight(w, w_scale), Layout(n), *TAIL)
        of_x = ASYMMETRIC._replace(group=whole)
        assert all(map(same_bits, OPS.quantize(x, of_x), codes))
        weight = packed(w, w_scale, None, whole)
        assert same_bits(found, OPS.linear(*codes, *weight, *TAIL))
        assert same_bits(found, OPS.linear_dynamic(x, *weight, None, of_x, *TAIL[1:]))
        nothing = torch.zeros(n, 1, dtype=torch.int32)
        assert same_bits(found, OPS.linear(*codes, *packed(w, w_scale, nothing, 0), *TAIL))


@given(ISAS, POSITIVE, DEPTHS, POSITIVE, st.sampled_from([32, 64, 96]), WHOSE, SEEDS)
def test_is_the_sum_of_its_groups(
    isa: str, m: int, k: int, n: int, group: int, whose: str, seed: int
) -> None:
    """Exactly: codes and scales are such that every sum is an integer below 2^24. (E3)"""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape, top: torch.randint(-top, top, shape, generator=generator)  # noqa: E731
    groups = -(-k // group)
    q, w = draw(m, k, top=8).char(), draw(n, k, top=8).char()
    shapes = [(rows, groups if o in whose else 1) for rows, o in ((m, "x"), (n, "w"))]
    zero, w_zero = (draw(*shape, top=8).int() for shape in shapes)
    scale, w_scale = (2.0 ** draw(*shape, top=2).abs() for shape in shapes)
    with on_isa(isa):
        y = OPS.linear(q, scale, zero, *packed(w, w_scale, w_zero, group), *TAIL)
    x_mk, w_nk = (
        (codes.double() - _spread(z, group, k)) * _spread(s, group, k)
        for codes, z, s in ((q, zero, scale), (w, w_zero, w_scale))
    )
    assert torch.equal(y.double(), x_mk @ w_nk.t())


def _spread(values: Tensor, group: int, k: int) -> Tensor:
    """Values of groups, or of rows, as values of elements."""
    return values.expand(-1, k) if values.shape[1] == 1 else _in_k(values, group, k)


@given(ISAS, POSITIVE, DEPTHS, POSITIVE, GROUPS, SEEDS)
def test_where_the_scales_lie_changes_nothing(
    isa: str, m: int, k: int, n: int, group: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = OPS.quantize(torch.randn(m, k, generator=generator), ASYMMETRIC)
    w_q, *rows = in_groups(torch.randn(n, k, generator=generator), group, 8, False)
    columns = [v.t().contiguous().t() for v in rows]
    wide = [torch.cat([v, v], 1)[:, : v.shape[1]] for v in columns]
    first, layout = packed(w_q, *rows, group)
    for other in (columns, wide):
        assert torch.equal(packed(w_q, *other, group)[0], first)
    apart = [torch.stack([v, v], -1)[..., 0] for v in codes]
    with on_isa(isa):
        found = OPS.linear(*codes, first, layout, *TAIL)
        assert same_bits(found, OPS.linear(*apart, first, layout, *TAIL))


def test_the_longest_group_holds_its_extremes(isa: str) -> None:
    """Every code -128 and every zero point 127, or the other way: sums of 255^2 K, exact. (E3)"""
    k = 33025
    for code, zero in ((-128, 127), (127, -128)):
        q, w = torch.full((3, k), code).char(), torch.full((40, k), code).char()
        zeros, w_zero = torch.full((3, 1), zero).int(), torch.full((40, 1), zero).int()
        weight = packed(w, torch.ones(40, 1), w_zero, 0)
        y = OPS.linear(q, torch.ones(3, 1), zeros, *weight, *TAIL)
        assert (y == float(torch.tensor(255 * 255 * k).float())).all()


def test_a_fault_shows_where_it_came_from(isa: str) -> None:
    """NaN and infinity in a row of x or in a group of w: in that row, in that column. (Q4)"""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(9, 200, generator=generator), torch.randn(70, 200, generator=generator)
    x[2, 5], x[7, 150], w[3, 70], w[64, 199] = torch.nan, torch.inf, torch.nan, -torch.inf
    for symmetric in (True, False):
        w_q, w_scale, w_zero = in_groups(w, 64, 8, symmetric)
        weight = packed(w_q, w_scale, None if symmetric else w_zero, 64)
        expected = torch.zeros(9, 70, dtype=torch.bool)
        expected[[2, 7]], expected[:, [3, 64]] = True, True
        for group in (0, 64):
            codes = OPS.quantize(x, ASYMMETRIC._replace(group=group))
            y = OPS.linear(*codes, *weight, *TAIL)
            assert torch.equal(y.isfinite(), ~expected)


def test_a_group_that_is_no_multiple_of_32_is_an_error() -> None:
    phrase = "group=100 is no multiple of 32"
    with pytest.raises(ValueError, match=re.escape(phrase)):
        in_groups(torch.ones(2, 300), 100, 4, True)
