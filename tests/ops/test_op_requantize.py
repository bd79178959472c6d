"""linear_requantize and linear_float beyond the table: faults, chains, errors bounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qfx.ops.code import Code
from qfx.ops.layout import Layout
from tests.conftest import on_isa, same_bits
from tests.lib.strategies import DTYPES, FAULTY, FINITE, ISAS, POSITIVE, SEEDS, codes, filled

OPS = torch.ops.qfx


def _codes_of(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return OPS.quantize(x, Code(symmetric=0))


@given(ISAS, POSITIVE, POSITIVE, POSITIVE, st.booleans(), st.sampled_from(FAULTY + FINITE), SEEDS)
def test_equals_linear_then_quantize(
    isa: str, m: int, k: int, n: int, symmetric: bool, fill: str, seed: int
) -> None:
    """The same bits as the two operators, faulty rows included."""
    generator = torch.Generator().manual_seed(seed)
    x, w = filled(fill, m, k, generator), torch.randn(n, k, generator=generator)
    w_codes, w_scale, _ = OPS.quantize(w, Code())
    linear = (*_codes_of(x), OPS.pack_weight(w_codes, w_scale), Layout(n), None, "none")
    given, code = (torch.rand(m, 1, generator=generator) + 0.01, None), Code(8, int(symmetric))
    with on_isa(isa):
        y = OPS.linear(*linear, torch.float32)
        expected = OPS.quantize(y, code, *given)
        found = OPS.linear_requantize(*linear, *given, code)
    assert all(same_bits(f, e) for f, e in zip(found, expected, strict=True))


def test_an_infinite_row_shows_and_leaves_the_others_alone(isa: str) -> None:
    """One product overflows float32: that row's codes are 0 and its scale infinite. (Q4)"""
    q = torch.ones(3, 4, dtype=torch.int8)
    scale = torch.tensor([[1.0], [3e38], [2.0]])
    zero = torch.zeros(3, 1, dtype=torch.int32)
    weight = OPS.pack_weight(torch.ones(40, 4, dtype=torch.int8), torch.ones(40))
    linear = (q, scale, zero, weight, Layout(40), None, "none")
    how = (torch.tensor([0.5]), None, Code())
    out, row_scale, row_zero = OPS.linear_requantize(*linear, *how)
    assert row_scale.flatten().tolist() == [0.5, torch.inf, 0.5]
    assert out[:, 0].tolist() == [8, 0, 16] and not out[1].any() and not row_zero.any()


@given(ISAS, st.integers(1, 9), POSITIVE, POSITIVE, DTYPES, st.data())
def test_weight_only_is_within_its_bound(
    isa: str, m: int, k: int, n: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    """(W1): K / 2 fused multiply-adds, a sum, a product."""
    generator = torch.Generator().manual_seed(data.draw(SEEDS))
    x = torch.randn(m, k, generator=generator).to(dtype)
    w = data.draw(codes(n, k))
    w_scale = torch.rand(n, generator=generator)
    with on_isa(isa):
        weight = OPS.pack_weight(w, w_scale)
        y = OPS.linear_float(x, weight, Layout(n), None, "none", torch.float32)
    terms, scale = (x.double().abs() @ w.double().abs().t()), w_scale.double()
    error = (y.double() - x.double() @ w.double().t() * scale).abs()
    assert (error <= (k / 2 + 8) * 2.0**-24 * terms * scale + 2.0**-140).all()


@pytest.mark.parametrize(("m", "k"), [(23, 600), (301, 64)])
def test_weight_only_of_tiles_and_blocks_of_rows(isa: str, m: int, k: int) -> None:
    """Rows in tiles, blocks of rows and blocks of K have the bits that they have alone."""
    generator = torch.Generator().manual_seed(m)
    codes = torch.randint(-128, 128, (40, k), generator=generator, dtype=torch.int8)
    weight = OPS.pack_weight(codes, torch.ones(40))
    x, how = torch.randn(m, k, generator=generator), (weight, Layout(40), None, "none")
    y = OPS.linear_float(x, *how, torch.float32)
    alone = [OPS.linear_float(row, *how, torch.float32) for row in x.split(1)]
    assert same_bits(y, torch.cat(alone))


CALLS = {
    "out_scale": ({"out_scale": torch.ones(4)}, "out_scale has 4 elements, expected one for"),
    "out_zero": (
        {"out_zero_point": torch.zeros(1)},
        "zero_point has dtype Float, expected Int",
    ),
    "bits": ({"out_code": Code(9)}, "bits=9 is outside 2..8"),
    "groups": (
        {"layout": Layout(6, group=64, scale_group=64)},
        "the weight has groups, zero points or few bits, expected one scale a row",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_error_sentence(name: str) -> None:
    changed, phrase = CALLS[name]
    arguments = {"out_scale": torch.ones(1), "out_zero_point": None, "out_code": Code()}
    arguments |= {"layout": Layout(6), **changed}
    codes, group = torch.ones(6, 128).char(), arguments["layout"].group
    weight = OPS.pack_weight(codes, torch.ones(6, 2 if group else 1), group=group)
    q = (torch.ones(3, 128).char(), torch.ones(3, 1), torch.zeros(3, 1).int())
    with pytest.raises(RuntimeError, match=phrase):
        OPS.linear_requantize(*q, weight, bias=None, activation="none", **arguments)
