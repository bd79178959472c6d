"""int8_linear_requantize and int8_weight_linear beyond the table: faults, chains, errors bounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.conftest import on_isa, same_bits
from tests.lib.strategies import DTYPES, FAULTY, FINITE, ISAS, POSITIVE, SEEDS, codes, filled

OPS = torch.ops.qfx


def _codes_of(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return OPS.quantize(x, [1], 8, False)


@given(ISAS, POSITIVE, POSITIVE, POSITIVE, st.booleans(), st.sampled_from(FAULTY + FINITE), SEEDS)
def test_equals_linear_then_quantize_static(
    isa: str, m: int, k: int, n: int, symmetric: bool, fill: str, seed: int
) -> None:
    """The same bits as the two operators, faulty rows included."""
    generator = torch.Generator().manual_seed(seed)
    x, w = filled(fill, m, k, generator), torch.randn(n, k, generator=generator)
    w_codes, w_scale, _ = OPS.quantize(w, [1], 8, True)
    linear = (*_codes_of(x), OPS.pack_weight(w_codes), w_scale.flatten(), None, "none")
    how = (torch.rand(m, 1, generator=generator) + 0.01, None, 8, symmetric)
    with on_isa(isa):
        y = OPS.int8_linear(*linear, torch.float32)
        expected = OPS.quantize_static(y, *how)
        found = OPS.int8_linear_requantize(*linear, *how)
    assert all(same_bits(f, e) for f, e in zip(found, expected, strict=True))


def test_an_infinite_row_shows_and_leaves_the_others_alone(isa: str) -> None:
    """One product overflows float32: that row's codes are 0 and its scale infinite. (Q4)"""
    q = torch.ones(3, 4, dtype=torch.int8)
    scale = torch.tensor([[1.0], [3e38], [2.0]])
    zero = torch.zeros(3, 1, dtype=torch.int32)
    packed = OPS.pack_weight(torch.ones(40, 4, dtype=torch.int8))
    linear = (q, scale, zero, packed, torch.ones(40), None, "none")
    how = (torch.tensor([0.5]), None, 8, True)
    out, row_scale, row_zero = OPS.int8_linear_requantize(*linear, *how)
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
        packed = OPS.pack_weight(w)
        y = OPS.int8_weight_linear(x, packed, w_scale, None, "none", torch.float32)
    terms, scale = (x.double().abs() @ w.double().abs().t()), w_scale.double()
    error = (y.double() - x.double() @ w.double().t() * scale).abs()
    assert (error <= (k / 2 + 8) * 2.0**-24 * terms * scale + 2.0**-140).all()


def test_weight_only_of_more_rows_than_are_widened_at_a_time() -> None:
    """2^22 floats: rows behind them are those that they are alone."""
    m, k = 2**16 + 7, 64
    x, packed = torch.randn(m, k), OPS.pack_weight(torch.ones(3, k, dtype=torch.int8))
    how = (packed, torch.ones(3), None, "none", torch.float32)
    y = OPS.int8_weight_linear(x, *how)
    parts = [OPS.int8_weight_linear(part, *how) for part in (x[: 2**16], x[2**16 :])]
    assert same_bits(y, torch.cat(parts))


CALLS = {
    "out_scale": ({"out_scale": torch.ones(4)}, "out_scale has 4 elements, expected one for"),
    "out_zero": (
        {"out_zero_point": torch.zeros(1)},
        "zero_point has dtype Float, expected Int",
    ),
    "bits": ({"bits": 9}, "bits=9 is outside 2..8"),
}


@pytest.mark.parametrize("name", CALLS)
def test_error_sentence(name: str) -> None:
    changed, phrase = CALLS[name]
    q, packed = torch.ones(3, 8, dtype=torch.int8), OPS.pack_weight(torch.ones(6, 8).char())
    zero = torch.zeros(3, 1, dtype=torch.int32)
    arguments = {"out_scale": torch.ones(1), "out_zero_point": None, "bits": 8, **changed}
    with pytest.raises(RuntimeError, match=phrase):
        OPS.int8_linear_requantize(
            q, torch.ones(3, 1), zero, packed, torch.ones(6), None, "none",
            symmetric=True, **arguments,
        )  # fmt: skip
