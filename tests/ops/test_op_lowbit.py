"""Linears of 4- and 5-bit weights, and their packing: laws beyond the table. (E4) (Q14) (W3)"""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import qfx._C as _C
from qfx.ops import REFERENCES
from qfx.ops.code import Code
from qfx.ops.header import MINIMUMS, NONE, ZERO_POINTS
from qfx.ops.layout import Layout
from qfx.ops.lowbit_packing import GROUPS, lowbit_size
from qfx.ops.weight_values import weight_values
from tests.conftest import on_isa, on_threads, same_bits
from tests.lib.pairs import pairs
from tests.lib.strategies import FAULTY, FINITE, ISAS, LAYOUTS, POSITIVE, SEEDS, filled, strided

OPS = torch.ops.qfx
TAIL = (None, "none", torch.float32)
DEPTHS = st.sampled_from([0, 1, 7, 8, 31, 32, 33, 65, 127, 200, 513, 1100])
POSITIVE_DEPTHS = DEPTHS.filter(bool)
ROWS = st.sampled_from([0, 1, 2, 3, 4, 5, 8, 9, 33, 70])
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Parts:
    """A weight of `bits` in groups of `group`: what `pack_weight` takes."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    minimum: Tensor | None
    bits: int
    group: int

    def pack(self) -> tuple[Tensor, Layout]:
        """The weight's arguments of the products."""
        return OPS.pack_weight(*self.arguments), self.layout

    @property
    def layout(self) -> Layout:
        shift = int(self.zero is not None or self.minimum is not None)
        return Layout(len(self.codes), self.bits, self.group, self.group, shift)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (self.codes, self.scale, self.zero, self.minimum, self.bits, self.group)

    @property
    def values(self) -> Tensor:
        """w^ float64 [N, K]. (Q14)"""
        lowest = -(1 << (self.bits - 1))
        if self.minimum is not None:
            u = self.codes.double() - lowest
            return u * self.each(self.scale) + self.each(self.minimum)
        zero = 0 if self.zero is None else self.each(self.zero)
        return (self.codes.double() - zero) * self.each(self.scale)

    def each(self, of_groups: Tensor) -> Tensor:
        spread = of_groups.double().repeat_interleave(self.group, 1)
        return spread[:, : self.codes.shape[1]]


KINDS = st.tuples(
    st.sampled_from([4, 5]), st.sampled_from(GROUPS), st.sampled_from([NONE, ZERO_POINTS, MINIMUMS])
)
Kind = tuple[int, int, int]
LINEAR_KINDS = KINDS.filter(lambda kind: kind[2] != MINIMUMS)


def parts_of(
    n: int, k: int, kind: Kind, seed: int, half: torch.dtype | None = torch.bfloat16
) -> Parts:
    """Random codes, extremes among them; `half` None: scales are powers of two."""
    bits, group, shift = kind
    g = torch.Generator().manual_seed(seed)
    each, limit = (n, -(-k // group)), 1 << (bits - 1)

    def codes(*shape: int) -> Tensor:
        q = torch.randint(-limit, limit, shape, generator=g)
        return torch.where(torch.rand(shape, generator=g) < 0.2, q.sign() * limit, q).clamp(
            -limit, limit - 1
        )

    if half is None:
        scale, low = (2.0 ** torch.randint(-1, 2, each, generator=g) for _ in range(2))
    else:
        scale, low = ((torch.rand(*each, generator=g) + 0.01).to(half).float() for _ in range(2))
    zero = codes(*each).int() if shift == ZERO_POINTS else None
    minimum = -low if shift == MINIMUMS else None
    return Parts(codes(n, k).char(), scale, zero, minimum, bits, group)


# --- packing ---


@given(POSITIVE | st.just(0), DEPTHS, KINDS, st.sampled_from(HALVES), LAYOUTS, SEEDS)
def test_unpack_is_the_inverse_of_pack(
    n: int, k: int, kind: Kind, half: torch.dtype, layout: str, seed: int
) -> None:
    """And the kernel writes what the reference does, byte for byte."""
    parts = parts_of(n, k, kind, seed, half)
    codes = strided(parts.codes, "slice" if layout == "expanded" else layout)
    packed = OPS.pack_weight(codes, *parts.arguments[1:])
    assert torch.equal(packed, REFERENCES["pack_weight"](*parts.arguments))
    assert len(packed) == lowbit_size(n, k, *kind)
    for unpack in (OPS.unpack_weight, REFERENCES["unpack_weight"]):
        codes, scale, zero, minimum = unpack(packed, parts.layout, k)
        nothing = torch.zeros_like(scale)
        lowest = -(1 << (parts.bits - 1)) * (kind[2] == MINIMUMS)
        wanted = nothing.int() + lowest if parts.zero is None else parts.zero
        assert torch.equal(codes, parts.codes) and torch.equal(zero, wanted)
        assert same_bits(scale, parts.scale)
        assert same_bits(minimum, nothing if parts.minimum is None else parts.minimum)


@given(POSITIVE, POSITIVE_DEPTHS, KINDS, st.sampled_from(HALVES), SEEDS)
def test_scales_keep_the_bits_of_their_half_type(
    n: int, k: int, kind: Kind, half: torch.dtype, seed: int
) -> None:
    """Any finite value of bfloat16 or of float16: denormals, zeros of both signs, the largest."""
    parts = parts_of(n, k, kind, seed)
    g = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, parts.scale.shape, generator=g).to(torch.int16)
    scale = bits.view(half).float()
    scale = torch.where(scale.isfinite(), scale, torch.finfo(half).max)
    shift = (parts.zero, None if parts.minimum is None else scale.flip(0))
    packed = OPS.pack_weight(parts.codes, scale, *shift, parts.bits, parts.group)
    _, found, _, minimum = OPS.unpack_weight(packed, parts.layout, k)
    assert same_bits(found, scale)
    assert parts.minimum is None or same_bits(minimum, scale.flip(0))


@pytest.mark.parametrize("bits, most", [(4, 0.56), (5, 0.69)])
def test_takes_little_memory(bits: int, most: float) -> None:
    """Of what int8 codes and scales of as many groups take."""
    for group, shift in ((64, NONE), (64, ZERO_POINTS), (128, ZERO_POINTS)):
        n, k = 256, 1024
        codes, scale = torch.zeros(n, k, dtype=torch.int8), torch.ones(n, k // group)
        int8 = len(OPS.pack_weight(codes, scale, group=group))
        assert lowbit_size(n, k, bits, group, shift) <= most * int8


# --- products ---


@given(ISAS, ROWS, DEPTHS, POSITIVE, KINDS, st.booleans(), st.booleans(), SEEDS)
def test_is_exact_where_float32_is(
    isa: str, m: int, k: int, n: int, kind: Kind, symmetric: bool, of_groups: bool, seed: int
) -> None:
    """With scales that are powers of two every sum is a multiple of 2^-2 below 2^22. (E4)"""
    parts = parts_of(n, k, kind, seed, half=None)
    g = torch.Generator().manual_seed(seed + 1)
    columns = -(-k // parts.group) if of_groups else 1
    q = torch.randint(-4, 5, (m, k), generator=g).char()
    zero = torch.randint(-4, 5, (m, columns), generator=g).int() * (not symmetric)
    scale = 2.0 ** torch.randint(-1, 2, (m, columns), generator=g)
    with on_isa(isa):
        y = OPS.linear(q, scale, zero, *parts.pack(), *TAIL)
    zeros, scales = (parts.each(v) if of_groups else v.double() for v in (zero, scale))
    x = (q.double() - zeros) * scales
    assert torch.equal(y.double(), x @ parts.values.t())


@given(ISAS, ROWS, POSITIVE_DEPTHS, POSITIVE, LINEAR_KINDS, st.booleans(), st.booleans(), SEEDS)
def test_is_the_int8_linear_of_the_same_codes(
    isa: str, m: int, k: int, n: int, kind: Kind, symmetric: bool, of_groups: bool, seed: int
) -> None:
    """Bit for bit. (E3)"""
    parts = parts_of(n, k, kind, seed)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(seed))
    codes = OPS.quantize(x, Code(8, int(symmetric), 0, parts.group if of_groups else 0))
    with on_isa(isa):
        found = OPS.linear(*codes, *parts.pack(), *TAIL)
        same = OPS.linear(*codes, *replace(parts, bits=8).pack(), *TAIL)
    assert same_bits(found, same)


@pytest.mark.parametrize(
    "m, n, shift", pairs([1, 3], [31, 32, 65, 544, 1089], [NONE, ZERO_POINTS, MINIMUMS])
)
def test_what_is_done_to_the_sums_of_many_panels(m: int, n: int, shift: int) -> None:
    """Panels are multiplied some at a time, and their sums may be the output itself. (E1)"""
    parts = parts_of(n, 96, (4, 32, shift), seed=n)
    g = torch.Generator().manual_seed(n)
    codes = OPS.quantize(torch.randn(m, 96, generator=g), Code())
    weight, biases = parts.pack(), (None, torch.randn(n, generator=g))
    ends = itertools.product(biases, ("none", "silu"), (torch.float32, torch.bfloat16))
    for end in ends:
        with on_isa("ref"):
            expected = OPS.linear(*codes, *weight, *end)
        for isa in _C.isas():
            with on_isa(isa):
                assert same_bits(OPS.linear(*codes, *weight, *end), expected), (isa, end)


@given(
    st.sampled_from(FINITE + FAULTY), ROWS, DEPTHS, POSITIVE, KINDS, st.integers(2, 8),
    st.booleans(), st.sampled_from(["row", "tensor", "group"]), st.sampled_from([1, 2]), LAYOUTS,
    SEEDS,
)  # fmt: skip
def test_every_instruction_set_and_form_has_the_same_bits(
    fill: str, m: int, k: int, n: int, kind: Kind, bits: int, symmetric: bool, whose: str,
    threads: int, layout: str, seed: int,
) -> None:  # fmt: skip
    """linear_dynamic == linear(quantize) == linear_ste, and float rows."""
    parts = parts_of(n, k, kind, seed)
    x = strided(filled(fill, m, k, torch.Generator().manual_seed(seed)), layout)
    group = parts.group if whose == "group" else 0
    code = Code(bits, int(symmetric), int(whose == "tensor"), group)
    weight = parts.pack()

    def forms() -> list[Tensor]:
        codes = OPS.quantize(x, code)
        trained = (list(codes), *weight, [*code, 8, 0], None, torch.float32)
        return [
            OPS.linear(*codes, *weight, *TAIL),
            OPS.linear_dynamic(x, *weight, None, code, *TAIL[1:]),
            OPS.linear_ste(x, None, None, None, None, *trained),
            OPS.linear_float(x, *weight, *TAIL),
        ]

    with on_isa("ref"):
        expected = forms()
    assert all(same_bits(form, expected[0]) for form in expected[1:3])
    for isa in _C.isas():
        with on_isa(isa), on_threads(threads):
            assert all(map(same_bits, forms(), expected)), isa


@given(ISAS, ROWS, DEPTHS, POSITIVE, KINDS, SEEDS)
def test_float_rows_are_near_the_float_product(
    isa: str, m: int, k: int, n: int, kind: Kind, seed: int
) -> None:
    """A product is rounded at most K_g times in its group, and then once for each that follows, of
    codes and of minimums. (W3)"""
    parts = parts_of(n, k, kind, seed)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(seed))
    with on_isa(isa):
        y = OPS.linear_float(x, *parts.pack(), *TAIL).double()
    w = parts.values
    lowest = -(1 << (parts.bits - 1))
    least = parts.each(parts.minimum).abs() if parts.minimum is not None else 0
    zero = parts.each(parts.zero) if parts.zero is not None else lowest * (kind[2] == MINIMUMS)
    size = (parts.codes.double() - zero).abs() * parts.each(parts.scale) + least
    roundings = parts.group + 2 * -(-k // parts.group) + 2
    bound = roundings * 2.0**-24 * 1.01 * (x.double().abs() @ size.t())
    assert ((y - x.double() @ w.t()).abs() <= bound).all()


@pytest.mark.parametrize(
    "bits, shift, isa", pairs([4, 5], [NONE, ZERO_POINTS, MINIMUMS], _C.isas()), indirect=["isa"]
)
def test_the_greatest_sums_of_a_group(bits: int, shift: int, isa: str) -> None:
    """Codes and zero points of opposite ends: sums do not leave the integers that hold them."""
    limit = 1 << (bits - 1)
    for m in (1, 40):
        for code, zero in ((-limit, limit - 1), (limit - 1, -limit)):
            n, k, group = 33, 256, 128
            codes, each = torch.full((n, k), code).char(), (n, 2)
            zeros = torch.full(each, zero).int() if shift == ZERO_POINTS else None
            minimum = torch.full(each, 3.0) if shift == MINIMUMS else None
            parts = Parts(codes, torch.ones(each), zeros, minimum, bits, group)
            for q, q_zero in ((-128, 127), (127, -128), (-128, 0), (127, 0)):
                x, z = torch.full((m, k), q).char(), torch.full((m, 1), q_zero).int()
                y = OPS.linear(x, torch.ones(m, 1), z, *parts.pack(), *TAIL)
                assert torch.equal(y.double(), (q - q_zero) * parts.values.sum(1).expand(m, n))


def test_a_fault_shows_where_it_came_from(isa: str) -> None:
    """NaN and infinity in a row of x, or in a scale or minimum: in that row, in that column."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, 200, generator=g)
    x[2, 5], x[7, 150] = torch.nan, torch.inf
    for shift in (NONE, ZERO_POINTS, MINIMUMS):
        parts = parts_of(70, 200, (4, 64, shift), 0)
        parts.scale[3, 1] = torch.nan
        (parts.scale if parts.minimum is None else parts.minimum)[64, 3] = torch.inf
        expected = torch.zeros(40, 70, dtype=torch.bool)
        expected[[2, 7]], expected[:, [3, 64]] = True, True
        for rows in (slice(0, 8), slice(0, 40)):
            codes = OPS.quantize(x[rows], Code())
            y = OPS.linear(*codes, *parts.pack(), *TAIL)
            assert torch.equal(y.isfinite(), ~expected[rows])
            y = OPS.linear_float(x[rows], *parts.pack(), *TAIL)
            assert torch.equal(y.isfinite(), ~expected[rows])


@given(ROWS, POSITIVE_DEPTHS, POSITIVE, KINDS, st.booleans(), st.sampled_from([0, 16, 64]), SEEDS)
def test_gradients_are_those_of_the_float_linear(
    m: int, k: int, n: int, kind: Kind, with_factor: bool, rotation: int, seed: int
) -> None:
    """dx = G w^, turned back where x was turned, and db. (T1)"""
    parts, g = parts_of(n, k, kind, seed), torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=g, requires_grad=True)
    bias = torch.randn(n, generator=g, requires_grad=True)
    factor = torch.rand(k, generator=g) + 0.5 if with_factor else None
    code = Code(rotation=rotation)
    codes = OPS.quantize(x.detach(), code, factor=factor)
    weight = parts.pack()
    how = ([*code, 8, 0], None, torch.float32, factor)
    y = OPS.linear_ste(x, None, bias, None, None, list(codes), *weight, *how)
    grad = torch.randn(m, n, generator=g)
    dx, db = torch.autograd.grad(y, (x, bias), grad)
    w_hat = weight_values(*weight, k, torch.float32)
    assert same_bits(w_hat, parts.values.float())
    turned = OPS.rotate(grad @ w_hat, factor, rotation, True)
    assert same_bits(dx, turned) and same_bits(db, grad.sum(0))


@given(
    ROWS, POSITIVE_DEPTHS, POSITIVE, LINEAR_KINDS, st.sampled_from(["row", "group", "static"]),
    st.booleans(), SEEDS,
)  # fmt: skip
def test_gradients_are_those_of_the_same_codes_in_8_bits(
    m: int, k: int, n: int, kind: Kind, whose: str, with_factor: bool, seed: int
) -> None:
    """Of x, of the bias and of a given step, bit for bit. (T1) (T2)"""
    parts, g = parts_of(n, k, kind, seed), torch.Generator().manual_seed(seed)
    x, bias, step = (torch.randn(*shape, generator=g) for shape in ((m, k), (n,), (1,)))
    factor = torch.rand(k, generator=g) + 0.5 if with_factor else None
    code = Code(group=parts.group if whose == "group" else 0)
    given_step = step.abs() / 64 if whose == "static" else None
    codes = list(OPS.quantize(x, code, given_step, factor=factor))
    how = ([*code, 8, 0], None, torch.float32, factor)
    grad, found = torch.randn(m, n, generator=g), []
    for weight in (parts.pack(), replace(parts, bits=8).pack()):
        learned = [t.clone().requires_grad_() for t in (x, bias, given_step) if t is not None]
        of_x, of_bias, of_step = (*learned, None)[:3]
        y = OPS.linear_ste(of_x, None, of_bias, of_step, None, codes, *weight, *how)
        found.append([y.detach(), *torch.autograd.grad(y, learned, grad)])
    assert all(map(same_bits, *found))


# --- errors ---

GOOD = Parts(
    torch.ones(6, 100).char(), torch.ones(6, 2), torch.zeros(6, 2).int(), None, bits=4, group=64
)
OTHER = GOOD.layout._replace
PACKED = GOOD.pack()[0]
Q = torch.ones(5, 100).char()
X = Q.float()
ONE = (torch.ones(1, 1), torch.zeros(1, 1).int())


def pack(**other: Any) -> Tensor:
    names = ("codes", "scale", "zero_point", "minimum", "bits", "group")
    given = dict(zip(names, GOOD.arguments, strict=True)) | {"zero_point": None} | other
    return OPS.pack_weight(*given.values())


def linear(q: Tensor = Q, weight: Tensor = PACKED, **other: Any) -> Tensor:
    how = {"scale": ONE[0], "zero_point": ONE[1], "layout": GOOD.layout, "bias": None} | other
    return OPS.linear(q, weight=weight, activation="none", out_dtype=torch.float32, **how)


def weight_only(x: Tensor = X, weight: Tensor = PACKED, layout: Layout = GOOD.layout) -> Tensor:
    return OPS.linear_float(x, weight, layout, *TAIL)


def dynamic(x: Tensor = X, factor: Tensor | None = None, **code: int) -> Tensor:
    return OPS.linear_dynamic(x, PACKED, GOOD.layout, None, Code(**code), *TAIL[1:], factor)


def with_field(at: int, kind: str, value: int) -> Tensor:
    """The packed weight with another number in its header."""
    found = bytearray(PACKED.view(torch.uint8).tolist())
    struct.pack_into(kind, found, at, value)
    return torch.tensor(list(found), dtype=torch.uint8).view(torch.int8)


SIZE = len(PACKED)
CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "bits": (lambda: pack(bits=6), "pack_weight: bits=6, expected 4, 5 or 8"),
    "group": (lambda: pack(group=96), "pack_weight: group=96, expected 32, 64 or 128"),
    "codes_range": (
        lambda: pack(codes=GOOD.codes * 8),
        "codes have 8, which is no code of 4 bits: they lie in [-8, 7]",
    ),
    "codes_range_of_5": (lambda: pack(codes=GOOD.codes * -17, bits=5), "codes have -17, which is"),
    "zero_range": (
        lambda: pack(zero_point=torch.full((6, 2), -9).int()),
        "zero points have -9, which is no code of 4 bits: they lie in [-8, 7]",
    ),
    "scale_type": (lambda: pack(scale=GOOD.scale.bfloat16()), "scale has dtype BFloat16, expected"),
    "scale_shape": (
        lambda: pack(scale=torch.ones(6)),
        "scale has shape 6, expected 6x2: one for each group of 64 of K=100",
    ),
    "minimum_shape": (lambda: pack(minimum=torch.ones(2, 6)), "minimum has shape 2x6, expected"),
    "both": (
        lambda: pack(zero_point=GOOD.zero, minimum=GOOD.scale),
        "both zero_point and minimum are given, expected one of them",
    ),
    "scale_values": (
        lambda: pack(scale=torch.full((6, 2), 1 + 2.0**-20)),
        "scale has values that are neither all bfloat16 nor all float16: round them first",
    ),
    "halves": (
        lambda: pack(scale=torch.full((6, 2), 2.0**100), minimum=torch.full((6, 2), 1 + 2.0**-10)),
        "scale and minimum are not of one type: neither bfloat16 nor float16 holds both",
    ),
    "wrong_k": (
        lambda: linear(Q[:, :99]),
        "linear: x has K=99 (shape 5x99) but the weight was packed for K=100",
    ),
    "scale_count": (
        lambda: linear(scale=torch.ones(5, 3)),
        "scale has shape 5x3, expected one value, one for each of 5 rows, or one for each of their "
        "2 groups",
    ),
    "group_of_x": (lambda: dynamic(group=32), "group=32, expected 0 or the 64 that the weight"),
    "rotation": (lambda: dynamic(rotation=8), "linear_dynamic: rotation=8, expected 0, 16 or 64"),
    "header_bits": (lambda: linear(weight=with_field(8, "<I", 3)), "says 3 bits, expected 4, 5"),
    "header_shift": (lambda: linear(weight=with_field(12, "<I", 3)), "its header says shift 3"),
    "header_scales": (
        lambda: linear(weight=with_field(16, "<I", 0)),
        "its header says scales of type 0",
    ),
    "header_group": (
        lambda: linear(weight=with_field(40, "<q", 48)),
        "its header says groups of 48 and scales of 64, expected 32, 64 or 128 for both",
    ),
    "header_n": (lambda: linear(weight=with_field(24, "<q", -1)), "its header says N=-1 K=100"),
    "header_k": (lambda: linear(weight=with_field(32, "<q", 2**40)), "its header says N=6 K=1099"),
    "header_size": (
        lambda: linear(weight=with_field(32, "<q", 300)),
        f"it has {SIZE} bytes, N=6 K=300 in 4 bits takes",
    ),
    "header_checksum": (lambda: linear(weight=with_field(16, "<I", 2)), "its header is damaged"),
    "truncated": (lambda: linear(weight=PACKED[:-1]), f"it has {SIZE - 1} bytes, N=6 K=100 in 4"),
    "too_long": (lambda: linear(weight=torch.cat([PACKED, PACKED])), f"it has {2 * SIZE} bytes"),
}


@pytest.mark.parametrize("name", CALLS)
def test_error_sentence(name: str) -> None:
    call, phrase = CALLS[name]
    with pytest.raises(RuntimeError, match=re.escape(phrase)):
        call()
