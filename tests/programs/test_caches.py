"""A cache in a program: the bytes and bits of its operators, on every instruction set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import qfx._C as _C
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

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
    places = torch.arange(drawn.first, drawn.first + drawn.tokens)
    masks = [] if drawn.mask is None else [drawn.mask]

    def step(q: Any, k: Any, v: Any, at: Any, a: Any, b: Any, c: Any, d: Any, *mask: Any) -> Any:
        q, k, v = (aten.transpose.int(x, 1, 2) for x in (q, k, v))
        ops.kv_write.default(a, b, c, d, k, v, at)
        seen = mask[0] if mask else None
        return ops.kv_attention.default(q, a, b, c, d, seen, 0.3, LENGTH, torch.float32)

    plain = (lambda q, k, v, at, a, b, c, d: step(q, k, v, at, a, b, c, d)) if not masks else (
        lambda q, k, v, at, a, b, c, d, m: step(q, k, v, at, a, b, c, d, m)
    )  # fmt: skip
    given_ = (drawn.q, drawn.k, drawn.v, places)
    for isa in _C.isas():
        _C.set_isa(isa)
        expected, found = drawn.cache(), drawn.cache()
        y = step(*given_, *expected, *masks)
        runner = built(plain, (*given_, *found, *masks))
        (z,) = runner(*given_, *found, *masks)
        assert runner.outside == [] and same_bits(z, y)
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def test_a_place_that_is_none() -> None:
    made = kv_empty(1, 1, 16, 8)
    k = torch.randn(1, 1, 1, 8)

    def written(x: Any, at: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        ops.kv_write.default(a, b, c, d, x, x, at)
        return (aten.neg.default(x),)

    runner = built(written, (k, torch.tensor([0]), *made))
    for place in (16, -1):
        with pytest.raises(IndexError, match=f"place {place} of a cache that has room for 16"):
            runner(k, torch.tensor([place]), *made)
    runner(k, torch.tensor([15]), *made)
