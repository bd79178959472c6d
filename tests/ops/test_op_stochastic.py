"""The laws of stochastic rounding (Q7), on every instruction set of this machine.

Statistical tests run over fixed seeds. Their z-scores use exact variances and stay below 5, which
chance alone exceeds with probability 6e-7 for each figure; fixed seeds do not draw again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import qfx  # noqa: F401
import qfx._C as _C
from qfx.ops import REFERENCES
from qfx.ops.code import Code
from qfx.ops.philox import ROUNDS, philox, random_bits
from qfx.ops.quantize import code_range
from tests.conftest import on_isa, on_threads, same_bits
from tests.lib.pairs import every
from tests.lib.strategies import (
    BITS,
    CODES,
    DTYPES,
    FAULTY,
    FINITE,
    ISAS,
    LAYOUTS,
    matrices,
    strided,
)

ops = torch.ops.qfx
SYMMETRIC = CODES.map(lambda code: code._replace(symmetric=1))
WIDE_SEEDS = st.integers(-(2**63), 2**63 - 1)
MAX_Z = 5


def seed_of(value: int) -> Tensor:
    return torch.tensor([value])


def stochastic(
    x: Tensor, seed: Tensor, code: Code | None = None, factor: Tensor | None = None
) -> Any:
    """Codes, scale and zero point of x, rounded at random."""
    return ops.quantize(x, code or Code(), None, None, seed, factor)


def codes_of(x: Tensor, seeds: range) -> Tensor:
    """Codes of x under each seed: int64 [seeds, ...]."""
    rounded = [stochastic(x, seed_of(s))[0] for s in seeds]
    return torch.stack(rounded).long()


def largest_z(sums: Tensor, variances: Tensor) -> float:
    return float((sums.double() / variances.double().sqrt()).abs().max())


# --- the codes ---


@given(matrices(fills=FINITE + FAULTY), DTYPES, SYMMETRIC, WIDE_SEEDS, ISAS, LAYOUTS, st.booleans())
def test_equals_its_reference(
    x: Tensor, dtype: torch.dtype, code: Code, seed: int, isa: str, layout: str, scaled: bool
) -> None:
    """(Q7) and (R1) bit for bit; NaN and infinity as in (Q4)."""
    x = strided(x.to(dtype), layout)
    factor = torch.linspace(0.3, 2, x.shape[-1]) if scaled else None
    given_all = (x, code, None, None, seed_of(seed), factor)
    with on_isa(isa):
        got = ops.quantize(*given_all)
    expected = REFERENCES["quantize"](*given_all)
    assert all(same_bits(g, e) for g, e in zip(got, expected, strict=True))
    deterministic = ops.quantize(x, code, factor=factor)[1:]
    assert all(same_bits(g, e) for g, e in zip(got[1:], deterministic, strict=True))


ODD_SEEDS = [0, 1, -1, 2**32, -(2**63), 6700417 * 2**35 + 1]


@pytest.mark.parametrize(
    "isa, below, seed",
    [(*each, seed) for each, seed in every(product(_C.isas(), [0, 1]), ODD_SEEDS)],
    indirect=["isa"],
)
def test_every_random_bit_counts(seed: int, below: int, isa: str) -> None:
    """A fraction of 1 - u rounds up, one of 2^-16 less does not: so the kernel's bits are those."""
    u = random_bits(seed_of(seed), 5000).double() * 2**-16 + 2**-17
    x = (1 - u - below * 2**-16).float()[None]
    x[0, ::777] = 127  # makes the scale 1
    q = stochastic(x, seed_of(seed))[0]
    assert torch.equal(q, torch.where(x == 127, 127, 1 - below).to(torch.int8))


@given(WIDE_SEEDS, st.integers(1, 7), st.integers(1, 700), st.sampled_from([1, 2, 3]), ISAS)
def test_leading_axes_and_threads_change_nothing(
    seed: int, rows: int, columns: int, threads: int, isa: str
) -> None:
    x = torch.randn(4, 25, rows, columns, generator=torch.Generator().manual_seed(1))
    with on_isa(isa), on_threads(threads):
        q = stochastic(x, seed_of(seed))[0]
    with on_isa("ref"), on_threads(1):
        flat = stochastic(x.reshape(-1, columns), seed_of(seed))[0]
    assert torch.equal(q, flat.reshape(q.shape))


@given(matrices(), SYMMETRIC, WIDE_SEEDS, ISAS)
def test_codes_are_next_to_the_value(x: Tensor, code: Code, seed: int, isa: str) -> None:
    """Less than a step away, but for the roundings of x * inv and of the sum: 4 half-ulps."""
    qmax = code_range(code.bits, True)[1]
    with on_isa(isa):
        q, scale, zero_point = stochastic(x, seed_of(seed), code)
    assert not zero_point.any() and (q.abs() <= qmax).all()
    assert ((q - x.double() / scale.double()).abs() <= 1 + qmax * 2.0**-22).all()


@given(BITS, WIDE_SEEDS, ISAS)
def test_integers_stay_themselves(bits: int, seed: int, isa: str) -> None:
    qmin, qmax = code_range(bits, True)
    x = torch.arange(qmin, qmax + 1).repeat(9).float()[None] * 0.25
    with on_isa(isa):
        q, scale, _ = stochastic(x, seed_of(seed), Code(bits))
    assert torch.equal(q * scale, x)


# --- unbiased and independent ---


def fractions() -> Tensor:
    """[1, N]: each integer -127..126 plus 1/8, 9/64, ... 7/8, then 127, which makes the scale 1.

    Rarer roundings than 1/8 would need more seeds to be close to normal.
    """
    x = torch.arange(-127, 127)[:, None] + torch.arange(8, 57) / 64
    return torch.cat([x.reshape(1, -1), torch.tensor([[127.0]])], 1)


def test_each_element_is_unbiased(isa: str) -> None:
    """The mean of q - x over 2000 seeds, for each of 12446 elements. (B3)

    The fractions are multiples of 2^-16 and the sums exact, so (B3) allows no bias at all.
    """
    x, seeds = fractions(), 2000
    errors = (codes_of(x, range(seeds)) - x.double()).sum(0)[:, :-1]
    fraction = x[:, :-1].remainder(1)
    assert largest_z(errors, seeds * fraction * (1 - fraction)) < MAX_Z


def test_dot_products_are_unbiased_with_the_variance_of_independent_terms(isa: str) -> None:
    """Over 4000 seeds, for 50 vectors. A normal variable's variance is known to 2 var^2 / seeds;
    correlated elements would show in it."""
    seeds = 4000
    x = fractions()[:, ::7].contiguous()
    x[0, -1] = 127
    w = torch.randn(x.shape[1], 50, generator=torch.Generator().manual_seed(0)).double()
    errors = (codes_of(x, range(seeds))[:, 0] - x.double()) @ w
    fraction = x[0].double().remainder(1)
    variance = (fraction * (1 - fraction)) @ w.square()
    assert largest_z(errors.sum(0), seeds * variance) < MAX_Z
    surplus = errors.square().sum(0) - seeds * variance
    assert largest_z(surplus, 2 * seeds * variance.square()) < MAX_Z


def centred(seed: int, count: int) -> Tensor:
    """u - 1/2 of elements 0..count-1, in units of its standard deviation."""
    return (random_bits(seed_of(seed), count).double() - 32767.5) / ((2**32 - 1) / 12) ** 0.5


def test_random_bits_are_uniform() -> None:
    """Each of the 16 bits, the mean, and the count of each value's high and low byte."""
    count = 2**20
    bits = random_bits(seed_of(1), count)
    each = (bits[:, None] >> torch.arange(16) & 1).sum(0) - count / 2
    assert largest_z(each, torch.tensor(count / 4)) < MAX_Z
    assert largest_z(centred(1, count).sum(), torch.tensor(count)) < MAX_Z
    for byte in (bits & 255, bits >> 8):
        surplus = byte.bincount(minlength=256) - count / 256
        assert largest_z(surplus, torch.tensor(count / 256 * (1 - 1 / 256))) < MAX_Z


def test_neighbours_are_uncorrelated() -> None:
    """At distances 1 to 130, which hold every way that two elements share a block or a lane."""
    count, longest = 2**16, 130
    u = centred(2, count + longest)
    products = u.unfold(0, count, 1)[1:] @ u[:count]
    assert len(products) == longest and largest_z(products, torch.tensor(count)) < MAX_Z


@pytest.mark.parametrize("apart", [1, 2, 2**31, 2**32, 2**62])
def test_seeds_are_uncorrelated(apart: int) -> None:
    """At the same element and at the 64 after it, for 10 seeds and those `apart` from them."""
    count, shifts = 2**13, 65
    for seed in range(10):
        products = centred(seed + apart, count + shifts).unfold(0, count, 1) @ centred(seed, count)
        assert largest_z(products, torch.tensor(count)) < MAX_Z


ONES = 0xFFFFFFFF
PUBLISHED = [  # counter, key -> words: known answers that come with the authors' Random123 library
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((ONES,) * 4, (ONES,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]


@pytest.mark.parametrize("counter, key, expected", PUBLISHED)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert ROUNDS == 7
    words = philox([torch.tensor(c) for c in counter], [torch.tensor(k) for k in key])
    assert tuple(map(int, words)) == expected


# --- bad arguments ---

X, SEED = torch.ones(3, 32), torch.tensor([1])
CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "seed_count": (
        lambda: stochastic(X, torch.tensor([1, 2])),
        "quantize: seed has shape 2, expected a single element",
    ),
    "seed_type": (lambda: stochastic(X, SEED.int()), "seed has dtype Int, expected Long"),
    "x_type": (
        lambda: stochastic(X.double(), SEED),
        "x has dtype Double, expected Float or BFloat16 or Half",
    ),
    "factor": (lambda: stochastic(X, SEED, None, torch.ones(3)), "quantize: factor has"),
    "bits": (lambda: stochastic(X, SEED, Code(9)), "bits=9 is outside 2..8"),
    "asymmetric": (
        lambda: stochastic(X, SEED, Code(symmetric=0)),
        "rounding at random is for symmetric codes and no rotation",
    ),
    "rotation": (
        lambda: stochastic(X, SEED, Code(rotation=16)),
        "rounding at random is for symmetric codes and no rotation",
    ),
    "group": (
        lambda: stochastic(X, SEED, Code(group=32)),
        "group=32, but scales that are given and rounding at random are for whole rows",
    ),
    "scale": (
        lambda: ops.quantize(X, Code(), torch.ones(1), None, SEED),
        "both a scale and a seed are given, expected one of them",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_error_sentence(name: str) -> None:
    call, phrase = CALLS[name]
    with pytest.raises(RuntimeError, match=re.escape(phrase)):
        call()
