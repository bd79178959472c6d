"""The laws of quantization (docs/numerics.md) for the CUDA kernels, on the emulator."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qfx.ops import REFERENCES
from qfx.ops.code import Code
from qfx.ops.layout import Layout
from qfx.ops.weight import cuda_pack_weight
from tests.conftest import same_bits
from tests.cuda.emulator import emulate, packed_codes, run
from tests.lib.pairs import every
from tests.lib.strategies import (
    AXES,
    BITS,
    DTYPES,
    FAULTY,
    FINITE,
    LAYOUTS,
    SEEDS,
    SIZES,
    codes,
    matrices,
    strided,
)  # fmt: skip
from tests.ops.test_op_parts import as_tuple

HALVES = (torch.bfloat16, torch.float16)
# On both sides of the longest rows that a warp, and a block, holds in registers.
LENGTHS = [a + b for a in (1024, 8192, 16384) for b in (-1, 0, 1, 8, 64)]
TRANSFORMS = st.sampled_from([(False, 0), (True, 0), (False, 16), (True, 64)])


def assert_same(op: str, *arguments: Any) -> None:
    """The emulated kernel's bits are the reference's."""
    expected = REFERENCES[op](*arguments)
    got = run(op, *arguments)
    pairs = zip(as_tuple(got), as_tuple(expected), strict=True)
    assert all(same_bits(g, e) for g, e in pairs)


def coded(axes: list[int], bits: int, symmetric: bool, rotation: int = 0) -> list[int]:
    return list(Code(bits, int(symmetric), len(axes) - 1, 0, rotation))


def assert_same_codes(x: Tensor, code: list[int], factor: Tensor | None = None, **how: Any) -> None:
    """`how`: scale and zero_point, or seed."""
    given = (how.get(name) for name in ("scale", "zero_point", "seed"))
    assert_same("quantize", x, code, *given, factor)


def transform(x: Tensor, with_factor: bool, rotation: int) -> tuple[Tensor | None, int]:
    k = x.shape[1]
    factor = torch.linspace(0.5, 2.0, k) if with_factor else None
    return factor, rotation


@given(
    matrices(fills=FINITE + FAULTY), DTYPES, AXES, BITS, st.booleans(), TRANSFORMS, LAYOUTS, SEEDS
)
def test_quantize(
    x: Tensor, dtype: torch.dtype, axes: list[int], bits: int, symmetric: bool,
    how: tuple[bool, int], layout: str, seed: int,
) -> None:  # fmt: skip
    """(Q1)-(Q4), (R1) from any memory, in any order of threads."""
    emulate(seed=seed)
    x = strided(x.to(dtype), layout)
    factor, rotation = transform(x, *how)
    assert_same_codes(x, coded(axes, bits, symmetric, rotation), factor)
    assert_same("fake_quantize", x, axes, bits, symmetric, dtype)
    at_random = torch.tensor([seed * 2**31 - 7])
    assert_same_codes(x, coded(axes, bits, True), factor, seed=at_random)


@given(matrices(fills=FINITE + FAULTY), DTYPES, BITS, st.booleans(), st.booleans(), SEEDS)
def test_quantize_with_given_scales(
    x: Tensor, dtype: torch.dtype, bits: int, symmetric: bool, per_row: bool, seed: int
) -> None:
    """(Q6), scales that are zero, negative, infinite and NaN included."""
    emulate(seed=seed)
    g = torch.Generator().manual_seed(seed)
    count = x.shape[0] if per_row else 1
    odd = torch.tensor([0.0, -1.0, torch.inf, -torch.inf, torch.nan, 1e-40, 3e38])
    scale = torch.cat([torch.rand(count, generator=g), odd])
    scale = scale[torch.randint(0, len(scale), (count,), generator=g)]
    zero = torch.randint(-300, 300, (count,), generator=g, dtype=torch.int32)
    given_zero = None if symmetric else zero
    code = coded([1], bits, symmetric)
    assert_same_codes(x.to(dtype), code, scale=scale, zero_point=given_zero)


@pytest.mark.parametrize("k, dtype", every(LENGTHS, [torch.float32, *HALVES]))
def test_rows_of_every_length(k: int, dtype: torch.dtype) -> None:
    """In the registers of a warp, in those of a block, and read again; aligned and not."""
    emulate(seed=k)
    x = torch.randn(3, k, generator=torch.Generator().manual_seed(k)).to(dtype)
    for rotation in (0, 64):
        for rows in (x, x[1:], torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].reshape(3, k)):
            assert_same_codes(rows, coded([1], 8, False, rotation))
            assert_same_codes(rows, coded([0, 1], 8, True, rotation), torch.linspace(1, 2, k))
            assert_same("rotate", rows, torch.linspace(1, 2, k), rotation, True)
    assert_same_codes(x, coded([1], 8, True), seed=torch.tensor([k]))


@pytest.mark.parametrize("rotation", [16, 64])
def test_the_rest_of_k_is_rotated(rotation: int) -> None:
    """In blocks of every size from 1 to 32, which lie in one thread or in several. (R1)"""
    for k in (1, 2, 3, 7, 8, 9, 15, 24, 40, 63, 64, 65, 120, 127, 240, 1087):
        x = torch.randn(3, k, generator=torch.Generator().manual_seed(k))
        for back in (False, True):
            assert_same("rotate", x, torch.linspace(1, 2, k), rotation, back)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("rows, columns", [(65, 130), (64, 64), (1, 200), (200, 2), (129, 63)])
def test_transposed_matrices(rows: int, columns: int, dtype: torch.dtype) -> None:
    """Turned by tiles, some of which the matrix does not fill; its lines lie apart."""
    emulate(seed=rows)
    lines = torch.randn(columns, rows + 3, generator=torch.Generator().manual_seed(columns))
    x = lines.to(dtype)[:, :rows].t()
    assert_same_codes(x, coded([1], 8, False))
    factor = torch.linspace(1, 2, columns)
    assert_same_codes(x, coded([1], 8, True), factor, seed=torch.tensor([7]))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_precision_input(dtype: torch.dtype, symmetric: bool) -> None:
    """All 65536 bit patterns, NaN and infinities in rows of their own kind. (Q3) (Q4)"""
    emulate()
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    assert_same_codes(patterns.view(dtype).reshape(-1, 32), coded([1], 8, symmetric))


@pytest.mark.parametrize("out_dtype", [torch.float32, *HALVES])
def test_results_round_to_the_nearest(out_dtype: torch.dtype) -> None:
    """One rounding of (E1), ties to even, over all exponents from denormals to overflow."""
    emulate()
    generator = torch.Generator().manual_seed(0)
    powers = torch.arange(-150, 128)[:, None]
    significands = torch.randint(-(2**24), 2**24, (len(powers), 999), generator=generator)
    significands[:, :256] = significands[:, :256] >> 11 << 11 | 1 << 10  # ties of half types
    how = (None, None, None, "none", out_dtype)
    scales = torch.ldexp(torch.ones(len(powers), 1), powers)
    assert_same("dequantize", significands.int(), scales, *how)


@given(
    st.data(),
    SIZES,
    SIZES,
    st.sampled_from([0, 64, 128, 1024]),
    st.booleans(),
    st.booleans(),
    SEEDS,
)
def test_unpack_is_the_inverse_of_pack(
    data: st.DataObject, n: int, k: int, group: int, by_group: bool, zeros: bool, seed: int
) -> None:  # fmt: skip
    """Codes, scales and zero points from any memory; no minimums."""
    emulate(seed=seed)
    g = torch.Generator().manual_seed(seed)
    w = data.draw(codes(n, k))
    each = (n, -(-k // group)) if group and by_group else (n, 1)
    scale = torch.rand(*each[::-1], generator=g).t()
    zero = torch.randint(-128, 128, each, generator=g, dtype=torch.int32) if zeros else None
    packed = run("pack_weight", w, scale, zero, None, 8, group)
    assert torch.equal(packed, cuda_pack_weight(w, scale, zero, group=group))
    unaligned = torch.cat([packed[:0], torch.zeros(3, dtype=torch.int8), packed])[3:]
    layout = Layout(n, 8, group, group if by_group else 0, int(zeros))
    got = run("unpack_weight", unaligned, list(layout), k)
    none = torch.zeros(each, dtype=torch.int32)
    expected = (w, scale, none if zero is None else zero, none.float())
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    if layout.one_scale:
        assert torch.equal(run("weight_scale", unaligned, n), scale[:, 0])


X, Q = torch.randn(5, 8), torch.ones(5, 8, dtype=torch.int8)
ONES, SEED = torch.ones(5), torch.tensor([1])
ROW, ZERO = [8, 1, 0, 0, 0], torch.zeros(5, 1, dtype=torch.int32)
CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "double": (
        lambda: run("quantize", X.double(), ROW),
        "quantize: x has dtype Double, expected Float or BFloat16 or Half",
    ),
    "rotation": (
        lambda: run("quantize", X, [8, 1, 0, 0, 8]),
        "quantize: rotation=8, expected 0, 16 or 64",
    ),
    "groups": (
        lambda: run("quantize", X, [8, 1, 0, 64, 0]),
        "quantize: x has a scale for each 64 elements of K, which has no kernel on CUDA",
    ),
    "scale_count": (
        lambda: run("quantize", X, ROW, torch.ones(4)),
        "scale has 4 elements, expected one for each of the 5 rows or a single one",
    ),
    "zero_point": (
        lambda: run("quantize", X, ROW, None, ZERO),
        "quantize: zero_point is given without a scale",
    ),
    "seed": (
        lambda: run("quantize", X, [8, 0, 0, 0, 0], None, None, SEED),
        "quantize: rounding at random is for symmetric codes and no rotation",
    ),
    "scale_and_seed": (
        lambda: run("quantize", X, ROW, ONES, None, SEED),
        "both a scale and a seed are given, expected one of them",
    ),
    "pack_group": (
        lambda: run("pack_weight", Q, ONES, None, None, 8, 32),
        "group=32, expected 0 (one scale for all of",
    ),
    "pack_scale": (
        lambda: run("pack_weight", Q, ONES[:4], None, None, 8, 64),
        "pack_weight: scale has shape 4, expected 5, 5x1 or 5x1",
    ),
    "pack_zero_point": (
        lambda: run("pack_weight", Q, ONES, ZERO),
        "zero_point has shape 5x1, expected 5 as scale has",
    ),
    "pack_longest": (
        lambda: run("pack_weight", Q[:, :1].expand(5, 33026), ONES[:, None], ZERO),
        "a group of 33026 with zero points is above 33025",
    ),
    "unpack_n": (
        lambda: run("unpack_weight", packed_codes(Q), [9, 8, 0, 0, 0], 8),
        "unpack_weight: the packed weight has 132 bytes, but one of the layout [9, 8, 0, 0, 0] for "
        "K=8 has 228",
    ),
    "unpack_group": (
        lambda: run("unpack_weight", packed_codes(Q), [5, 8, 96, 0, 0], 8),
        "unpack_weight: group=96, expected 0 (all of K) or a multiple of 64",
    ),
    "scale_n": (
        lambda: run("weight_scale", packed_codes(Q), 6),
        "weight_scale: the packed weight has shape 132, which none with N=6",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_error_sentence(name: str) -> None:
    emulate()
    call, phrase = CALLS[name]
    with pytest.raises(RuntimeError, match=re.escape(phrase)):
        call()
