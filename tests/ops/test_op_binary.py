"""The laws of the 1-bit product and linear (docs/numerics.md), on every instruction set."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import qfx  # noqa: F401
import qfx._C as _C
from qfx.ops import REFERENCES
from qfx.ops.binary import HEADER_BYTES, unpacked_signs
from tests.conftest import on_isa, on_threads, same_bits
from tests.lib.pairs import pairs
from tests.lib.rows import ACTIVATIONS
from tests.lib.strategies import (
    DTYPES,
    FAULTY,
    FINITE,
    ISAS,
    LAYOUTS,
    SEEDS,
    SIZES,
    filled,
    matrices,
    strided,
)  # fmt: skip

ops = torch.ops.qfx
THREADS = st.sampled_from([1, 2])
WEIGHT_TYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


def signs(t: Tensor) -> Tensor:
    return torch.where(t >= 0, 1, -1)


@st.composite
def weights(draw: st.DrawFn, n: int, k: int, fills: tuple[str, ...] = FINITE + FAULTY) -> Tensor:
    generator = torch.Generator().manual_seed(draw(SEEDS))
    return strided(filled(draw(st.sampled_from(fills)), n, k, generator), draw(LAYOUTS))


@given(st.data(), matrices(fills=FINITE + FAULTY), SIZES, DTYPES, WEIGHT_TYPES, LAYOUTS, ISAS)
def test_product_is_exact(
    data: st.DataObject, x: Tensor, n: int, dtype: torch.dtype, w_dtype: torch.dtype, layout: str,
    isa: str,
) -> None:  # fmt: skip
    """(H1), from any strides; a NaN counts as -1."""
    x = strided(x.to(dtype), layout)
    w = strided(data.draw(weights(n, x.shape[1])).to(w_dtype), layout)
    with on_isa(isa):
        sums = ops.binary_mm(x, ops.binary_pack(w), n)
    assert torch.equal(sums.long(), signs(x) @ signs(w).t())


@given(st.data(), SIZES, SIZES, WEIGHT_TYPES, ISAS)
def test_packing_keeps_the_signs(
    data: st.DataObject, n: int, k: int, dtype: torch.dtype, isa: str
) -> None:
    """The bytes of the reference, on every instruction set."""
    w = data.draw(weights(n, k)).to(dtype)
    with on_isa(isa):
        packed = ops.binary_pack(w)
    assert torch.equal(packed, REFERENCES["binary_pack"](w))
    assert torch.equal(unpacked_signs(packed, n, k), signs(w).double())


LENGTHS = [1, 31, 1919, 1920, 1921, 4096, 4097, 70001]


@pytest.mark.parametrize("k, same, isa", pairs(LENGTHS, [True, False], _C.isas()), indirect=["isa"])
def test_extreme_sums(k: int, same: bool, isa: str) -> None:
    """All bits equal or all different: the fullest counters, over blocks of K of all sizes."""
    x = torch.ones(7, k)
    packed = ops.binary_pack(torch.ones(33, k) if same else -torch.ones(33, k))
    assert (ops.binary_mm(x, packed, 33) == (k if same else -k)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sign_of_zero_nan_and_infinity(dtype: torch.dtype, isa: str) -> None:
    """+1 for both zeros, -1 for NaN and for denormals below zero; infinities have their signs."""
    tiny = -torch.finfo(dtype).smallest_normal / 4
    x = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, tiny], dtype=dtype)
    one = ops.binary_pack(torch.ones(1, 1))
    assert ops.binary_mm(x[:, None], one, 1).flatten().tolist() == [1, 1, -1, 1, -1, -1]
    assert torch.equal(unpacked_signs(ops.binary_pack(x[None]), 1, 6).flatten(), signs(x).double())


@given(
    st.data(), matrices(fills=FINITE + FAULTY), SIZES, DTYPES, DTYPES, ISAS,
    st.sampled_from(tuple(ACTIVATIONS)), st.booleans(), THREADS, LAYOUTS,
)  # fmt: skip
def test_all_forms_give_the_same_bits(
    data: st.DataObject, x: Tensor, n: int, dtype: torch.dtype, out: torch.dtype, isa: str,
    activation: str, with_bias: bool, threads: int, layout: str,
) -> None:  # fmt: skip
    """binary_linear == dequantize(binary_mm), on every instruction set and thread count."""
    x = strided(x.to(dtype), layout)
    packed = ops.binary_pack(data.draw(weights(n, x.shape[1])))
    scale, bias = torch.linspace(0.001, 0.02, n), torch.linspace(-2, 2, n) if with_bias else None
    with on_isa(isa), on_threads(threads):
        y = ops.binary_linear(x, packed, scale, bias, activation, out)
        sums = ops.binary_mm(x, packed, n)
        row_scale = torch.where(x.isnan().any(1, keepdim=True), torch.nan, 1.0)
        composed = ops.dequantize(sums, row_scale, None, scale, bias, activation, out)
    assert same_bits(y, composed)
    with on_isa("ref"):
        assert same_bits(y, ops.binary_linear(x, packed, scale, bias, activation, out))


@given(SIZES.filter(bool), SIZES, DTYPES, ISAS)
def test_nan_stays_in_its_row(k: int, n: int, dtype: torch.dtype, isa: str) -> None:
    """(H2); an infinity is a sign like any other."""
    x = torch.randn(5, k).to(dtype)
    faulty = x.clone()
    faulty[2, k // 2] = torch.nan
    faulty[3] = faulty[3].sign() * torch.inf + 0.0
    faulty[3].nan_to_num_(1.0, torch.inf, -torch.inf)
    packed, scale = ops.binary_pack(torch.randn(n, k)), torch.ones(n)
    with on_isa(isa):
        y = ops.binary_linear(faulty, packed, scale, None, "relu", torch.float32)
        clean = ops.binary_linear(x, packed, scale, None, "relu", torch.float32)
    assert y[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(y[others], clean[others])


@given(st.data(), ISAS)
def test_leading_axes_are_rows(data: st.DataObject, isa: str) -> None:
    shape = data.draw(st.lists(st.integers(0, 4), min_size=0, max_size=4))
    x, packed = torch.randn(*shape, 37), ops.binary_pack(torch.randn(5, 37))
    with on_isa(isa):
        sums = ops.binary_mm(x, packed, 5)
        flat = ops.binary_mm(x.reshape(x.numel() // 37, 37), packed, 5)
    assert torch.equal(sums, flat.reshape(*shape, 5))


@given(SIZES, SIZES, st.integers(1, 15), ISAS)
def test_packed_weights_may_lie_anywhere(k: int, n: int, offset: int, isa: str) -> None:
    """At an unaligned address, or with gaps."""
    x, packed = torch.randn(7, k), ops.binary_pack(torch.randn(n, k))
    unaligned = torch.cat([torch.zeros(offset, dtype=torch.int8), packed])[offset:]
    gaps = torch.stack([packed, packed], 1)[:, 0]
    with on_isa(isa):
        first = ops.binary_mm(x, packed, n)
        assert all(torch.equal(ops.binary_mm(x, p, n), first) for p in (unaligned, gaps))


def test_a_weight_takes_a_bit_an_element() -> None:
    assert ops.binary_pack(torch.randn(64, 4096)).numel() == HEADER_BYTES + 64 * 4096 // 8


X, PACKED, SCALE = torch.randn(5, 8), ops.binary_pack(torch.ones(6, 8)), torch.ones(6)


def linear(packed: Tensor = PACKED, **other: Any) -> Tensor:
    how = {"x": X, "packed": packed, "scale": SCALE, "bias": None, "activation": "none"}
    return ops.binary_linear(*{**how, **other}.values(), torch.float32)


def damaged(at: int, byte: int) -> Tensor:
    packed = PACKED.clone()
    packed[at] = byte
    return packed


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "wrong_k": (
        lambda: linear(x=torch.randn(5, 7)),
        "binary_linear: x has K=7 (shape 5x7) but the weight was packed for K=8",
    ),
    "wrong_n": (lambda: linear(scale=torch.ones(7)), "the weight was packed for N=6"),
    "wrong_n_of_mm": (lambda: ops.binary_mm(X, PACKED, 5), "N=5 is asked for"),
    "double": (lambda: linear(x=X.double()), "x has dtype Double, expected Float or BFloat16 or"),
    "scalar": (lambda: ops.binary_mm(torch.tensor(1.0), PACKED, 6), "x is a scalar"),
    "scale_matrix": (lambda: linear(scale=torch.ones(6, 1)), "scale has shape 6x1, expected 6"),
    "scale_double": (lambda: linear(scale=SCALE.double()), "scale has dtype Double"),
    "bias_length": (lambda: linear(bias=torch.ones(5)), "bias has shape 5, expected 6"),
    "activation": (lambda: linear(activation="softmax"), "unknown activation 'softmax'"),
    "int8_weight": (
        lambda: linear(ops.pack_weight(torch.ones(6, 8, dtype=torch.int8), torch.ones(6))),
        "it does not start with the magic bytes QFXB that binary_pack writes",
    ),
    "version": (lambda: linear(damaged(4, 9)), "layout 1 version 9, this build reads layout 1"),
    "header_n": (lambda: linear(damaged(16, 99)), "it has 192 bytes, N=99 K=8 takes 576"),
    "header_k": (lambda: linear(damaged(31, -1)), "its header says N=6 K=-"),
    "truncated": (lambda: linear(PACKED[:-1]), "it has 191 bytes, N=6 K=8 takes 192"),
    "no_header": (lambda: linear(PACKED[:9]), "it has 9 bytes, fewer than the header's 64"),
    "packed_matrix": (lambda: linear(PACKED[None]), "binary_pack returns one dimension"),
    "pack_vector": (lambda: ops.binary_pack(X[0]), "w has shape 8, expected [N, K]"),
    "pack_int": (lambda: ops.binary_pack(X.int()), "w has dtype Int, expected Float or"),
}


@pytest.mark.parametrize("name", CALLS)
def test_error_sentence(name: str) -> None:
    call, phrase = CALLS[name]
    with pytest.raises(RuntimeError, match=re.escape(phrase)):
        call()


def test_integers_are_constants_to_autograd() -> None:
    x = torch.randn(2, 8, requires_grad=True)
    assert not ops.binary_mm(x, PACKED, 6).requires_grad
    assert not ops.binary_pack(x).requires_grad
