"""A cache in a program: the bytes and bits of its operators, on every instruction set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import qfx._C as _C
from qfx.ops.kv_cache import kv_empty
from tests.lib.strategies import SEEDS
from tests.programs.traced import aten, built, same_bits

ops = torch.ops.qfx
LENGTH = 48  # of the cache
MASKS = ("none", "bool", "bool for each head", "float", "hides all")


@pytest.fixture(autouse=True)
def _isa() -> Iterator[None]:
    before = _C.isa()
    yield
    _C.set_isa(before)


class _Drawn:
    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self.generator = torch.Generator().manual_seed(draw(SEEDS))
        self.batch, self.heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
        self.group, self.d = draw(st.integers(1, 3)), draw(st.sampled_from([8, 16, 40, 64]))
        self.bits = draw(st.sampled_from([(8, 8), (8, 4), (4, 4)]))
        self.tokens = draw(st.integers(1, 5))
        self.first = draw(st.integers(0, LENGTH - self.tokens))
        self.mask = self.mask_of(draw(st.sampled_from(MASKS)))
        self.places = self.places_of(draw(st.booleans()))
        self.table = self.table_of(draw(st.booleans()))
        count = self.batch, self.tokens, self.heads, self.d
        self.k, self.v = self.randn(*count), self.randn(*count)
        self.q = self.randn(self.batch, self.tokens, self.heads * self.group, self.d)

    def randn(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=self.generator)

    def mask_of(self, kind: str) -> Tensor | None:
        heads = self.heads * self.group if kind == "bool for each head" else 1
        shape = self.batch, heads, self.tokens, LENGTH
        places = torch.arange(self.first, self.first + self.tokens)
        seen = (torch.arange(LENGTH) <= places[:, None]).expand(shape)
        if kind == "none":
            return None
        if kind == "float":
            return torch.where(seen, self.randn(*shape), -torch.inf)
        some = self.randn(*shape) < (-9 if kind == "hides all" else 1)
        return (seen & some).contiguous()

    def places_of(self, own: bool) -> Tensor:
        """Each sequence its own, one token of which goes nowhere, or the same for all."""
        places = torch.arange(self.first, self.first + self.tokens)
        if own:
            places = torch.stack([(places + 7 * b) % LENGTH for b in range(self.batch)])
            places[0, 0] = -1
        return places

    def table_of(self, there: bool) -> Tensor | None:
        shape = (self.batch, LENGTH // 16)
        how = {"generator": self.generator, "dtype": torch.int32}
        return torch.randint(self.batch, shape, **how) if there else None  # type: ignore[call-overload, no-any-return]

    def cache(self) -> tuple[Tensor, ...]:
        """Of other texts, which lie behind what is seen too."""
        made = kv_empty(self.batch, self.heads, LENGTH, self.d, *self.bits)
        generator = torch.Generator().manual_seed(1)
        former = torch.randn(self.batch, self.heads, LENGTH, self.d, generator=generator)
        ops.kv_write(*made, former, former, torch.arange(LENGTH))
        return made


@settings(max_examples=max(settings().max_examples // 4, 10))
@given(st.data())
def test_it_is_written_and_attended_to(data: st.DataObject) -> None:
    drawn = _Drawn(data.draw)
    has_mask, has_table = drawn.mask is not None, drawn.table is not None
    more = [t for t in (drawn.mask, drawn.table) if t is not None]

    def step(q: Any, k: Any, v: Any, at: Any, a: Any, b: Any, c: Any, d: Any, *rest: Any) -> Any:
        q, k, v = (aten.transpose.int(x, 1, 2) for x in (q, k, v))
        ops.kv_write.default(a, b, c, d, k, v, at)
        how = (rest[0] if has_mask else None, 0.3, LENGTH, torch.float32)
        return ops.kv_attention.default(q, a, b, c, d, *how, *(rest[-1:] if has_table else ()))

    plain: Any = {
        0: lambda q, k, v, at, a, b, c, d: step(q, k, v, at, a, b, c, d),
        1: lambda q, k, v, at, a, b, c, d, m: step(q, k, v, at, a, b, c, d, m),
        2: lambda q, k, v, at, a, b, c, d, m, t: step(q, k, v, at, a, b, c, d, m, t),
    }[len(more)]
    given_ = (drawn.q, drawn.k, drawn.v, drawn.places)
    for isa in _C.isas():
        _C.set_isa(isa)
        expected, found = drawn.cache(), drawn.cache()
        y = step(*given_, *expected, *more)
        runner = built(plain, (*given_, *found, *more))
        (z,) = runner(*given_, *found, *more)
        assert runner.outside == [] and same_bits(z, y)
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def test_a_place_that_is_none() -> None:
    made = kv_empty(1, 1, 16, 8)
    k = torch.randn(1, 1, 1, 8)

    def written(x: Any, at: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        ops.kv_write.default(a, b, c, d, x, x, at)
        return (aten.neg.default(x),)

    runner = built(written, (k, torch.tensor([0]), *made))
    for place in (16, -2):
        with pytest.raises(IndexError, match=f"place {place} of a cache that has room for 16"):
            runner(k, torch.tensor([place]), *made)
    runner(k, torch.tensor([15]), *made)
    before = [t.clone() for t in made]
    runner(-k, torch.tensor([-1]), *made)  # writes nothing
    assert all(map(torch.equal, made, before))


def test_a_block_table_of_other_sequences_is_refused() -> None:
    made = kv_empty(2, 1, 16, 8)

    def attended(q: Any, table: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        how = (None, 1.0, 16, torch.float32)
        return (ops.kv_attention.default(q, a, b, c, d, *how, table),)

    q, table = torch.randn(2, 1, 1, 8), torch.tensor([[1], [1]], dtype=torch.int32)
    runner = built(attended, (q, table, *made))
    assert runner.outside == []
    runner(q, table, *made)
    with pytest.raises(IndexError, match="has sequence 2, and the cache holds 2"):
        runner(q, table + 1, *made)
