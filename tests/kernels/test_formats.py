"""Operand formats: codes of 7 bits take faster kernels, chosen by the codes themselves, exact."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qfx import _C
from qfx.ops.code import Code
from qfx.ops.layout import Layout
from tests.conftest import on_isa
from tests.lib.pairs import pairs
from tests.lib.strategies import ISAS, POSITIVE, SEEDS

OPS = torch.ops.qfx
# Extremes of activations and weights on both sides of what counts as narrow (kernels.h).
CODES = (-128, -65, -64, 63, 64, 127)
WEIGHTS = (-128, -65, -64, 64, 65, 127)


def check_exact(q: Tensor, zero: Tensor, w: Tensor) -> None:
    n = len(w)
    found = OPS.int8_mm(q, zero, OPS.pack_weight(w, torch.ones(n)), n)
    assert torch.equal(found.double(), (q.double() - zero.double()) @ w.double().t())


@pytest.mark.parametrize("isa, code, w_code", pairs(_C.isas(), CODES, WEIGHTS), indirect=["isa"])
def test_extremes_are_exact(isa: str, code: int, w_code: int) -> None:
    """All pairs of sums at the edge of 16 bits, in every tile height, with and without a tail."""
    for m, k in ((1, 64), (2, 20), (3, 600), (14, 1030)):
        q = torch.full((m, k), code, dtype=torch.int8)
        w = torch.full((33, k), w_code, dtype=torch.int8)
        zero = torch.full((m, 1), -7, dtype=torch.int32)
        check_exact(q, zero, w)


@given(ISAS, POSITIVE, POSITIVE, POSITIVE, st.integers(2, 8), st.integers(2, 8), SEEDS)
def test_every_pair_of_bits_is_exact(
    isa: str, m: int, k: int, n: int, bits: int, w_bits: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    low, high = -(1 << bits - 1), 1 << w_bits - 1
    q = torch.randint(low, -low, (m, k), generator=generator, dtype=torch.int8)
    w = torch.randint(1 - high, high, (n, k), generator=generator, dtype=torch.int8)
    zero = torch.randint(low, -low, (m, 1), generator=generator, dtype=torch.int32)
    with on_isa(isa):
        check_exact(q, zero, w)


@given(ISAS, POSITIVE, POSITIVE, POSITIVE, st.integers(2, 7), SEEDS)
def test_dynamic_equals_quantize_then_linear(
    isa: str, m: int, k: int, n: int, bits: int, seed: int
) -> None:
    """The fused form knows the bits, the other looks at the codes: the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(rows, k, generator=generator) for rows in (m, n))
    codes, w_scale, _ = OPS.quantize(w, list(Code(bits)))
    given, code = (OPS.pack_weight(codes, w_scale), list(Layout(n)), None), [bits, 0, 0, 0, 0]
    with on_isa(isa):
        q = OPS.quantize(x, code)
        fused = OPS.linear_dynamic(x, *given, code, "none", torch.float32)
        assert torch.equal(OPS.linear(*q, *given, "none", torch.float32), fused)


def test_narrow_codes_have_kernels_of_their_own_where_16_bits_saturate() -> None:
    with on_isa("ref"):
        assert {_C.kernel_for(128, *bits) for bits in ((8, 8), (7, 7))} == {"s8s8_gemm_1x32__ref"}
    if "avx2" in _C.isas():
        with on_isa("avx2"):
            names = [_C.kernel_for(128, *bits) for bits in ((8, 8), (8, 7), (7, 8), (7, 7))]
        assert [name[:4] for name in names] == ["s8s8", "s8s7", "s7s8", "s7s7"]
