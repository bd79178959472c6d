"""Packed weights of every layout: what goes in comes out, parts are cut out of them, and operators
that are told another layout, or cannot take one, say so. Damage: test_op_errors.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import qfx._C as _C
from qfx.ops import REFERENCES
from qfx.ops.code import Code
from qfx.ops.header import MINIMUMS, NONE, ZERO_POINTS, header_of
from qfx.ops.layout import Layout
from qfx.ops.weight import packed_size
from qfx.ops.weight_values import weight_values
from tests.conftest import on_isa, same_bits
from tests.lib.pairs import pairs
from tests.lib.strategies import ISAS, LAYOUTS, POSITIVE, SEEDS, SIZES, codes, strided

OPS = torch.ops.qfx
FLOAT32 = ("none", torch.float32)
DEPTHS = st.sampled_from([0, 1, 31, 32, 64, 65, 128, 130, 200, 513])


class Kind(NamedTuple):
    """How a weight is stored: bits, elements of K whose products are added up by themselves,
    whether each group has scales of its own, and the shift."""

    bits: int
    group: int = 0
    by_group: bool = False
    shift: int = NONE

    def layout(self, n: int) -> Layout:
        return Layout(n, self.bits, self.group, self.group * self.by_group, int(self.shift > 0))


def _kinds(*fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Kind]:
    return st.tuples(*fields).map(lambda drawn: Kind(*drawn))


ZEROS = st.sampled_from([NONE, ZERO_POINTS])
KINDS = (
    _kinds(st.just(8), st.just(0), st.just(False), ZEROS)
    | _kinds(st.just(8), st.sampled_from([32, 64, 96, 640]), st.booleans(), ZEROS)
    | _kinds(st.sampled_from([4, 5]), st.sampled_from([32, 64, 128]), st.just(True),
             st.sampled_from([NONE, ZERO_POINTS, MINIMUMS]))
)  # fmt: skip


class Parts(NamedTuple):
    """The arguments of pack_weight, and what unpack_weight says of them."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    minimum: Tensor | None

    def packed(self, kind: Kind, pack: Callable[..., Tensor] = OPS.pack_weight) -> Tensor:
        return pack(*self, kind.bits, kind.group)

    def said(self, kind: Kind) -> tuple[Tensor, ...]:
        zero = torch.zeros_like(self.scale, dtype=torch.int32)
        zero = zero - (1 << (kind.bits - 1)) * (kind.shift == MINIMUMS)
        minimum = torch.zeros_like(self.scale) if self.minimum is None else self.minimum
        zero = zero if self.zero_point is None else self.zero_point
        return self.codes, self.scale, zero, minimum

    def cut(self, kind: Kind, dim: int, begin: int, end: int) -> Parts:
        """The same of rows, or of columns between groups."""
        step = kind.group if dim and kind.by_group else 1
        inside = slice(-(-begin // step), -(-end // step))
        values = [v if v is None or (dim and not kind.by_group) else _part(v, dim, inside)
                  for v in self[1:]]  # fmt: skip
        return Parts(_part(self.codes, dim, slice(begin, end)), *values)


def _part(t: Tensor, dim: int, inside: slice) -> Tensor:
    return (t[:, inside] if dim else t[inside]).contiguous()


def parts_of(n: int, k: int, kind: Kind, seed: int) -> Parts:
    g = torch.Generator().manual_seed(seed)
    half, each = 1 << (kind.bits - 1), (n, kind.layout(n).scales(k))
    draw = lambda *shape: torch.randint(-half, half, shape, generator=g)  # noqa: E731
    scale = (torch.rand(each, generator=g) + 0.01).bfloat16().float()
    zero = draw(*each).int() if kind.shift == ZERO_POINTS else None
    minimum = -scale * 8 if kind.shift == MINIMUMS else None
    return Parts(draw(n, k).char(), scale, zero, minimum)


# --- in and out ---


@given(SIZES, DEPTHS, KINDS, LAYOUTS, SEEDS)
def test_unpack_is_the_inverse_of_pack(n: int, k: int, kind: Kind, memory: str, seed: int) -> None:
    """And the kernel writes what the reference does, byte for byte, from any memory."""
    parts, layout = parts_of(n, k, kind, seed), kind.layout(n)
    memory = "slice" if memory == "expanded" else memory
    lying = Parts(*(t if t is None else strided(t, memory) for t in parts))
    weight = lying.packed(kind)
    assert torch.equal(weight, parts.packed(kind, REFERENCES["pack_weight"]))
    assert len(weight) == packed_size(layout, k, kind.shift)
    for unpack in (OPS.unpack_weight, REFERENCES["unpack_weight"]):
        assert all(map(same_bits, unpack(weight, layout, k), parts.said(kind)))


@given(st.data(), SIZES, SIZES, SEEDS)
def test_scales_of_rows(data: st.DataObject, n: int, k: int, seed: int) -> None:
    """They come out of a packed weight alone, and may be any floats; of shape [N], too."""
    g = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (n,), generator=g, dtype=torch.int64)
    scale, w = bits.to(torch.int32).view(torch.float32), data.draw(codes(n, k))
    weight = OPS.pack_weight(w, scale)
    assert torch.equal(weight, OPS.pack_weight(w, scale[:, None]))
    for found in (OPS.weight_scale(weight, n), REFERENCES["weight_scale"](weight, n)):
        assert torch.equal(found.view(torch.int32), scale.view(torch.int32))


@given(POSITIVE, DEPTHS, KINDS, SEEDS)
def test_the_values_of_a_weight(n: int, k: int, kind: Kind, seed: int) -> None:
    """(code - zero point) scale + minimum. (Q5) (Q14)"""
    parts, layout = parts_of(n, k, kind, seed), kind.layout(n)
    q, *of_groups = parts.said(kind)
    size = kind.group if kind.by_group else max(k, 1)
    scale, zero, minimum = (v.repeat_interleave(size, 1)[:, :k] for v in of_groups)
    wanted = (q - zero) * scale + minimum
    weight = parts.packed(kind)
    assert torch.equal(weight_values(weight, layout, k, torch.float32), wanted)
    half = weight_values(weight, layout, k, torch.bfloat16)
    assert torch.equal(half, wanted.bfloat16())


@pytest.mark.parametrize(
    "k, scale_group, isa", pairs([1, 32, 50, 64], [0, 64], _C.isas()), indirect=["isa"]
)
def test_one_group_has_one_scale_in_either_word(k: int, scale_group: int, isa: str) -> None:
    """Where K is no longer than a group, a scale for each group is one for each row."""
    parts = parts_of(5, k, Kind(8, 64), 0)
    layout = Layout(5, 8, 64, scale_group)
    weight, q = OPS.pack_weight(parts.codes, parts.scale, group=64), torch.ones(3, k).char()
    y = OPS.linear(q, torch.ones(1), torch.zeros(1).int(), weight, layout, None, *FLOAT32)
    assert same_bits(y, parts.codes.sum(1).float() * parts.scale[:, 0].expand(3, 5))
    assert same_bits(OPS.unpack_weight(weight, layout, k)[1], parts.scale)


# --- parts ---


@given(POSITIVE, DEPTHS, KINDS, st.sampled_from([0, 1]), st.data(), SEEDS)
def test_a_part_is_the_packed_part(
    n: int, k: int, kind: Kind, dim: int, data: st.DataObject, seed: int
) -> None:
    """Byte for byte; unpacked it is the part of what the whole holds, which it leaves alone."""
    parts, layout = parts_of(n, k, kind, seed), kind.layout(n)
    places = [*range(0, k, kind.group or 1), k] if dim else [*range(n), n]
    begin, end = sorted(data.draw(st.sampled_from(places)) for _ in range(2))
    weight = parts.packed(kind)
    before = weight.clone()
    cut, wanted = parts.cut(kind, dim, begin, end), None
    count = end - begin
    of_part, k_left = (layout, count) if dim else (layout._replace(n=count), k)
    wanted = cut.packed(kind)
    for function in (OPS.cut_weight, REFERENCES["cut_weight"]):
        found = function(weight, layout, k, dim, begin, end)
        assert torch.equal(found, wanted)
        assert all(map(same_bits, OPS.unpack_weight(found, of_part, k_left), cut.said(kind)))
    assert torch.equal(weight, before)


@given(ISAS, st.integers(1, 40), KINDS, SEEDS)
def test_parts_compute_parts(isa: str, m: int, kind: Kind, seed: int) -> None:
    """Rows of the weight are columns of the result; columns of it multiply theirs of x."""
    n, k = 70, 3 * max(kind.group, 64)
    layout, g = kind.layout(n), torch.Generator().manual_seed(seed)
    weight = parts_of(n, k, kind, seed).packed(kind)
    x = torch.randn(m, k, generator=g)
    q, scale, zero = OPS.quantize(x, Code(symmetric=0))

    def product(q: Tensor, weight: Tensor, layout: Layout) -> Tensor:
        return OPS.linear(q, scale, zero, weight, layout, None, *FLOAT32)

    with on_isa(isa):
        whole = product(q, weight, layout)
        rows = OPS.cut_weight(weight, layout, k, 0, 33, n)
        assert same_bits(product(q, rows, layout._replace(n=n - 33)), whole[:, 33:].contiguous())
        cuts = ((0, k // 3), (k // 3, k))
        columns = [OPS.cut_weight(weight, layout, k, 1, *cut, 16) for cut in cuts]
        halves = [product(q[:, a:b], w, layout) for (a, b), w in zip(cuts, columns, strict=True)]
    values = weight_values(weight, layout, k, torch.float32).double().abs()
    sizes = ((q.double() - zero).abs() * scale) @ values.t()
    assert ((sum(halves) - whole).double().abs() <= (2 * k + 8) * 2.0**-24 * sizes).all()


W = parts_of(6, 100, Kind(8, 64, True), 0).packed(Kind(8, 64, True))
GROUPS = Layout(6, 8, 64, 64)
CUTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "dim": ((2, 0, 1), "cut_weight: dim=2, expected 0 (rows) or 1 (columns)"),
    "begin": ((0, -1, 3), "cut_weight: begin=-1 and end=3 are outside 0..6"),
    "order": ((0, 3, 2), "cut_weight: begin=3 and end=2 are outside 0..6"),
    "end": ((1, 64, 101), "cut_weight: begin=64 and end=101 are outside 0..100"),
    "begin in a group": (
        (1, 32, 100),
        "cut_weight: begin=32 falls inside a group of 64 elements of K=100",
    ),
    "end in a group": (
        (1, 0, 99),
        "cut_weight: end=99 falls inside a group of 64 elements of K=100",
    ),
}


@pytest.mark.parametrize("name", CUTS)
def test_a_cut_that_cannot_be_made(name: str) -> None:
    how, phrase = CUTS[name]
    with pytest.raises(RuntimeError, match=re.escape(phrase)):
        OPS.cut_weight(W, GROUPS, 100, *how)


@pytest.mark.parametrize("place", [(16, 128), (0, 80)])
def test_a_cut_inside_a_rotated_block(place: tuple[int, int]) -> None:
    weight = OPS.pack_weight(torch.ones(6, 128).char(), torch.ones(6))
    phrase = r"cut_weight: (begin=16|end=80) falls inside a rotated block of 64 elements of K=128"
    with pytest.raises(RuntimeError, match=phrase):
        OPS.cut_weight(weight, Layout(6), 128, 1, *place, 64)
    assert len(OPS.cut_weight(weight, Layout(6), 128, 1, 64, 128, 64))


# --- another layout than the weight's ---

K = 128
WEIGHTS = {
    "rows": Kind(8),
    "zeros": Kind(8, shift=ZERO_POINTS),
    "sums": Kind(8, 64),
    "groups": Kind(8, 64, True),
    "few": Kind(4, 64, True),
    "minimums": Kind(5, 32, True, MINIMUMS),
}
Q, ONE, ZERO = torch.ones(3, K).char(), torch.ones(1), torch.zeros(1).int()
END = (None, *FLOAT32)
USES: dict[str, Callable[[Tensor, Layout], Any]] = {
    "linear": lambda w, of: OPS.linear(Q, ONE, ZERO, w, of, *END),
    "linear_dynamic": lambda w, of: OPS.linear_dynamic(Q.float(), w, of, None, Code(), *FLOAT32),
    "linear_float": lambda w, of: OPS.linear_float(Q.float(), w, of, *END),
    "linear_requantize": lambda w, of: OPS.linear_requantize(
        Q, ONE, ZERO, w, of, None, "none", ONE, None, Code()
    ),
    "linear_guarded": lambda w, of: OPS.linear_guarded(
        Q.float(), torch.ones(6, K), w, of, torch.ones(2), None, 1.0, "", Code(), *FLOAT32
    ),
    "unpack_weight": lambda w, of: OPS.unpack_weight(w, of, K),
    "cut_weight": lambda w, of: OPS.cut_weight(w, of, K, 0, 0, 3),
    "int8_mm": lambda w, of: OPS.int8_mm(Q, ZERO, w, of.n),
    "weight_scale": lambda w, of: OPS.weight_scale(w, of.n),
}
# Which weights an operator takes, where these are not all.
TAKEN = {
    "linear_float": {"rows", "few", "minimums"},
    "linear_requantize": {"rows"},
    "linear_guarded": {"rows", "zeros", "sums", "groups"},
    "int8_mm": {"rows"},
    "weight_scale": {"rows"},
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", WEIGHTS)
def test_an_operator_refuses_by_name_what_it_cannot_take(name: str, use: str) -> None:
    kind = WEIGHTS[name]
    weight = parts_of(6, K, kind, 0).packed(kind)
    if name in TAKEN.get(use, WEIGHTS):
        USES[use](weight, kind.layout(6))
        return
    with pytest.raises(RuntimeError, match=f"{use}: .*(expected|packed with)"):
        USES[use](weight, kind.layout(6))


@pytest.mark.parametrize("said", WEIGHTS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_layout_that_is_not_the_weights_is_told(name: str, said: str) -> None:
    kind = WEIGHTS[name]
    weight = parts_of(6, K, kind, 0).packed(kind)
    for use in ("linear", "linear_dynamic", "unpack_weight", "cut_weight"):
        if said == name:
            USES[use](weight, kind.layout(6))
            continue
        with pytest.raises(RuntimeError, match=f"{use}: the layout says .* the weight was packed"):
            USES[use](weight, WEIGHTS[said].layout(6))


def test_the_sentence_of_another_layout_has_both() -> None:
    with pytest.raises(RuntimeError) as caught:
        OPS.unpack_weight(W, Layout(6, 4, 32, 32, 1), 100)
    assert (
        "unpack_weight: the layout says 4 bits in groups of 32 with a scale each and zero points "
        "or minimums, but the weight was packed with 8 bits in groups of 64 with a scale each"
    ) in str(caught.value)


def test_a_header_says_what_was_packed() -> None:
    for kind in WEIGHTS.values():
        header = header_of(parts_of(6, K, kind, 0).packed(kind))
        assert (header.n, header.k, header.bits, header.shift) == (6, K, kind.bits, kind.shift)
        assert (header.group, header.scale_group) == (kind.group, kind.group * kind.by_group)
        assert header.scales == (torch.float32 if kind.bits == 8 else torch.bfloat16)
