"""A row of attention depends on the keys and values that it sees, and on no others. (A1)"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import qfx._C as _C
from qfx.ops.heads import added, matched
from tests.conftest import on_isa, on_threads, same_bits
from tests.lib import bounds
from tests.lib.bounds import Known
from tests.lib.pairs import every, pairs
from tests.lib.strategies import DTYPES, ISAS, SEEDS

OPS = torch.ops.qfx
ATTENTIONS = {"int8": OPS.int8_attention, "float": OPS.attention_decode}
SIZES = st.sampled_from([1, 2, 5, 13, 31, 32, 33, 64, 70])
LOWEST = torch.finfo(torch.float32).min


BOTH = [(True, True), (True, False), (False, True)]  # keys, values


class Heads(NamedTuple):
    """[batch, heads] of queries, and of the keys that they share or have for themselves."""

    queries: tuple[int, int]
    keys: tuple[int, int]


HEADS = (Heads((2, 2), (2, 2)), Heads((1, 4), (1, 2)), Heads((2, 3), (1, 1)), Heads((1, 2), (3, 1)))


def _padding(m: int, n: int) -> Tensor:
    """Keys behind the first third, and before the last, which all rows see."""
    places = torch.arange(n)
    return ((places < n - n // 3) & (places >= n // 4)).expand(m, n)


def _window(m: int, n: int) -> Tensor:
    distance = torch.arange(n) - torch.arange(m)[:, None]
    return (distance <= 0) & (distance > -3)


def _some(m: int, n: int) -> Tensor:
    return torch.rand(m, n) < 0.4


# Of b sequences, h heads, m queries and n keys.
MASKS: dict[str, Callable[[int, int, int, int], Tensor | None]] = {
    "none": lambda b, h, m, n: None,
    "padding": lambda b, h, m, n: _padding(m, n),
    "padding of one row": lambda b, h, m, n: _padding(1, n),
    "padding, whole": lambda b, h, m, n: _padding(m, n).contiguous(),
    "padding of each sequence": lambda b, h, m, n: torch.rand(b, 1, 1, n) < 0.7,
    "window": lambda b, h, m, n: _window(m, n),
    "some": lambda b, h, m, n: _some(m, n),
    "some of each head": lambda b, h, m, n: torch.rand(b, h, m, n) < 0.5,
    "minus infinity": lambda b, h, m, n: torch.randn(m, n).masked_fill(_some(m, n), -math.inf),
    "lowest": lambda b, h, m, n: torch.randn(m, n).masked_fill(_some(m, n), LOWEST),
    "lowest, padding": lambda b, h, m, n: torch.zeros(m, n).masked_fill(~_padding(m, n), LOWEST),
    "lowest of each head": lambda b, h, m, n: torch.randn(h, 1, n).masked_fill(
        _some(h, n)[:, None], LOWEST
    ),
    "-1e4": lambda b, h, m, n: torch.zeros(m, n).masked_fill(_some(m, n), -1e4),
    "transposed": lambda b, h, m, n: torch.randn(n, m).masked_fill(_some(n, m), -3e5).T,
}
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "larger": lambda x: x * 1e4,
    "other": lambda x: torch.randn_like(x) + 3,
    "nan": lambda x: torch.full_like(x, math.nan),
    "infinity": lambda x: torch.full_like(x, math.inf),
    "one element": lambda x: torch.where(torch.arange(x.shape[-1]) == 0, -math.inf, x),
    "zero": torch.zeros_like,
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "heads in rows": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "slice": lambda t: F.pad(t, (3, 2, 1, 0))[..., 1:, 3:-2],
    "transposed": lambda t: t.mT.contiguous().mT,
}


class Case(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    causal: bool

    def seen(self) -> Tensor:
        """[batch, heads, M, N] of the result."""
        q, k, _ = matched(self.q, self.k, self.v)
        b = added(self.mask, self.causal, q.shape[-2], k.shape[-2])
        return (b != -math.inf).expand(*q.shape[:-1], k.shape[-2])

    def run(self, op: str = "int8") -> Tensor:
        q, k, v, mask, causal = self
        return ATTENTIONS[op](q, k, v, mask, q.shape[-1] ** -0.5, causal, torch.float32)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    torch.manual_seed(draw(SEEDS))
    heads, layout = draw(st.sampled_from(HEADS)), LAYOUTS[draw(st.sampled_from([*LAYOUTS]))]
    m, n, d, e = (draw(SIZES) for _ in range(4))
    dtype = draw(DTYPES)
    q = torch.randn(*heads.queries, m, d).to(dtype)
    k, v = (layout(torch.randn(*heads.keys, n, size).to(dtype)) for size in (d, e))
    mask = MASKS[draw(st.sampled_from([*MASKS]))](*matched(q, k, v)[0].shape[:2], m, n)
    return Case(q, k, v, mask, draw(st.booleans()))


@given(ISAS, st.sampled_from([*ATTENTIONS]), cases(), st.sampled_from([*CHANGES]), st.data())
def test_a_row_does_not_change_with_what_it_does_not_see(
    isa: str, op: str, case: Case, change: str, data: st.DataObject
) -> None:
    """Bit for bit; and what it sees of a fault makes it NaN."""
    seen = case.seen()
    n = seen.shape[-1]
    row = seen.flatten(0, 2)[data.draw(st.integers(0, seen[..., 0].numel() - 1))]
    changed = ~row & (torch.rand(n) < data.draw(st.sampled_from([0.3, 1.0])))
    k, v = (
        torch.where(changed[:, None], CHANGES[change](t), t) if on else t
        for t, on in zip((case.k, case.v), data.draw(st.sampled_from(BOTH)), strict=True)
    )
    blind = ~(seen & changed).any(-1)
    with on_isa(isa):
        before, after = case.run(op), case._replace(k=k, v=v).run(op)
    assert same_bits(before[blind], after[blind])
    assert not after[blind].isnan().any()
    faulty = op == "int8" and change in ("nan", "infinity", "one element")
    assert after[~blind].isnan().all() or not faulty


@given(cases(), st.sampled_from([1, 2]))
def test_all_instruction_sets_layouts_and_heads_give_the_same_bits(
    case: Case, threads: int
) -> None:
    """Keys that are shared, expanded or copied for each head of queries."""
    q, k, v = matched(*case[:3])
    expected = case.run()
    copied = case._replace(q=q.contiguous(), k=k.contiguous(), v=v.contiguous())
    assert same_bits(expected, copied.run())
    assert same_bits(expected, case._replace(q=q, k=k, v=v).run())
    for isa in _C.isas():
        with on_isa(isa), on_threads(threads):
            assert same_bits(expected, case.run())


@pytest.mark.parametrize("kind", ["lowest of each head", "some of each head"])
def test_heads_that_share_keys_are_those_one_by_one(isa: str, kind: str) -> None:
    """Each sees other keys, and so their mean is another. (A2)"""
    torch.manual_seed(0)
    q, (k, v) = torch.randn(1, 4, 5, 24), torch.randn(2, 1, 2, 40, 24) + 1
    mask = torch.broadcast_to(MASKS[kind](1, 4, 5, 40), (1, 4, 5, 40))  # type: ignore[arg-type]
    y = Case(q, k, v, mask, False).run()
    for h in range(4):
        one, keys = slice(h, h + 1), slice(h // 2, h // 2 + 1)
        alone = Case(q[:, one], k[:, keys], v[:, keys], mask[:, one], False).run()
        assert same_bits(y[:, one], alone)


@given(ISAS, SIZES, SIZES, st.sampled_from([16, 40, 64]), st.sampled_from([LOWEST, -1e9]), SEEDS)
def test_a_row_that_is_masked_everywhere_equals_float(
    isa: str, m: int, n: int, d: int, value: float, seed: int
) -> None:
    """The lowest float swallows scores: the row becomes the mean of the values, as with queries of
    zeros. A mask of minus infinity, or of False, leaves nothing."""
    torch.manual_seed(seed)
    q, k, v = torch.randn(1, 2, m, d) * 0.1, torch.randn(1, 2, n, d), torch.randn(1, 2, n, d)
    mask = torch.randn(m, n).masked_fill(_some(m, n), value)
    mask[0] = value
    with on_isa(isa):
        y = OPS.int8_attention(q, k, v, mask, d**-0.5, False, torch.float32)
        none = OPS.int8_attention(q, k, v, mask > value, d**-0.5, False, torch.float32)
    known = [Known(t.double(), torch.zeros(t.shape).double()) for t in (q * 0, k, v)]
    limit = bounds.Attention().in_codes(bounds.U32, *known)[..., 0, :]
    assert ((y[..., 0, :] - v.double().mean(-2)).abs() <= limit).all()
    in_float = F.scaled_dot_product_attention(q, k, v, mask)[..., 0, :]
    assert ((y[..., 0, :] - in_float).abs() <= 2 * limit).all()
    assert not none[..., 0, :].any()


@given(ISAS, cases())
def test_within_the_bound_of_exact_attention(isa: str, case: Case) -> None:
    q, k, v = (t.float() for t in matched(*case[:3]))
    b = added(case.mask, case.causal, q.shape[-2], k.shape[-2]).double()
    scores = q.double() @ k.double().mT * q.shape[-1] ** -0.5 + b
    exact = scores.softmax(-1).nan_to_num(0) @ v.double()
    top = b.amax(-1).expand(exact.shape[:-1])
    plain = (top > -1e3) | (top == -math.inf)  # or the mask swallows scores
    with on_isa(isa):
        y = case.run().double()
    known = [Known(t.double(), torch.zeros(t.shape).double()) for t in (q, k, v)]
    masks = [] if case.mask is None else [Known(case.mask, torch.zeros(()))]
    limit = bounds.Attention(case.causal).in_codes(bounds.U32, *known, *masks)
    assert ((y - exact).abs() <= limit)[plain].all()


@pytest.mark.parametrize(
    "place, fault, isa", pairs(["q", "k", "v"], [math.nan, math.inf], _C.isas()), indirect=["isa"]
)
def test_faults_show_in_the_rows_that_see_them(isa: str, place: str, fault: float) -> None:
    torch.manual_seed(0)
    case = Case(*(torch.randn(2, 1, 40, 24) for _ in range(3)), None, True)
    getattr(case, place)[0, 0, 7, 3] = fault
    nan = case.run().isnan()
    rows = torch.arange(40)
    expected = rows == 7 if place == "q" else rows >= 7
    assert not nan[1].any() and torch.equal(nan[0, 0], expected[:, None].expand(40, 24))


# --- how rows are shared out ---


@given(
    st.sampled_from([1, 2, 12, 96]), st.sampled_from([1, 7, 64, 128, 512, 4096]),
    st.sampled_from([1, 100, 512, 4096]), st.booleans(), st.integers(1, 96),
)  # fmt: skip
def test_shares_hold_every_row_once_and_the_same_work(
    heads: int, rows: int, keys: int, causal: bool, threads: int
) -> None:
    cuts = _C.attention_shares(heads, rows, keys, causal, threads)
    assert len(cuts) == threads + 1 and cuts[0] == 0 and cuts[-1] == heads * rows
    assert cuts == sorted(cuts)
    of_row = [min(m + 1, keys) if causal else keys for m in range(rows)]
    until = torch.tensor([0, *of_row]).cumsum(0)
    before = [c // rows * int(until[-1]) + int(until[c % rows]) for c in cuts]
    work = [b - a for a, b in pairwise(before)]
    extra = 64 * -(-heads * rows // threads)  # what a row itself counts for
    assert max(work) <= sum(work) / threads + max(of_row) + extra


@pytest.mark.parametrize("threads, causal", every([4, 16, 32, 96], [False, True]))
def test_twelve_heads_keep_all_threads_busy(threads: int, causal: bool) -> None:
    """Of one sequence of 512 tokens: the most that a thread does is near the mean."""
    cuts = _C.attention_shares(12, 512, 512, causal, threads)
    scores = torch.ones(512, 512).tril().sum(-1) if causal else torch.full((512,), 512.0)
    work = torch.stack([part.sum() for part in (scores + 64).repeat(12).split(
        [b - a for a, b in pairwise(cuts)]
    )])  # fmt: skip
    assert work.max() <= 1.02 * work.mean()


# Of 2 sequences, 3 heads, 40 queries and 70 keys: what a mask [2, 1 or 3, 40, 70] may look like.
WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "of each head": lambda t: t.expand(2, 3, 40, 70).contiguous(),
    "keys first": lambda t: t.mT.contiguous().mT,
    "slice": lambda t: F.pad(t, (3, 2, 1, 0))[..., 1:, 3:-2],
    "backwards in sequences": lambda t: torch.stack([t[1], t[0]])[[1, 0]],
}


@pytest.mark.parametrize("layout, kind", every(WHOLE, ["bool", "float"]))
def test_a_mask_that_hides_nothing_is_none_and_one_that_hides_a_key_is_not(
    kind: str, layout: str
) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 40, 32), torch.randn(2, 3, 70, 32), torch.randn(2, 3, 70, 32)
    shown, hidden = (True, False) if kind == "bool" else (0.0, -math.inf)
    plain = torch.full((2, 1, 40, 70), shown)
    none = Case(q, k, v, None, False).run()
    assert same_bits(Case(q, k, v, WHOLE[layout](plain), False).run(), none)
    for place in ((0, 0, 0, 0), (1, 0, 39, 69), (0, 0, 39, 0), (1, 0, 0, 69), (1, 0, 17, 33)):
        one = plain.clone()
        one[place] = hidden
        y = Case(q, k, v, WHOLE[layout](one), False).run()
        assert not same_bits(y[place[0], :, place[2]], none[place[0], :, place[2]])


@pytest.mark.parametrize("shape", [(1, 1), (40, 1), (1, 70), (2, 1, 1, 1), (2, 1, 40, 1)])
def test_an_expanded_mask_is_read_where_it_lies(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 40, 32), torch.randn(2, 3, 70, 32), torch.randn(2, 3, 70, 32)
    for mask in (torch.ones(shape, dtype=torch.bool), torch.zeros(shape), torch.randn(shape)):
        wide = mask.expand(2, 3, 40, 70)
        found = Case(q, k, v, wide, False).run()
        assert same_bits(found, Case(q, k, v, wide.contiguous(), False).run())
