"""A cache of keys and values in pages: each text is what `kv_attention` makes of its tokens in one
piece, bit for bit. (K7)"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qfx.ops.kv_cache import kv_empty, kv_shapes
from qfx.ops.kv_pages import visible
from tests.conftest import on_isa, on_threads, same_bits
from tests.lib.strategies import DTYPES, ISAS, SEEDS

OPS = torch.ops.qfx
Cache = tuple[Tensor, ...]


class Text(NamedTuple):
    """A text of which `queries` tokens are new."""

    k: Tensor  # [length, H, D]
    v: Tensor
    q: Tensor  # [queries, Hq, D]
    pages: Tensor  # as many as it needs, and more


class Case(NamedTuple):
    cache: Cache
    texts: list[Text]
    bits: int
    window: int
    softcap: float

    def attend(self, cache: Cache | None = None) -> Tensor:
        """The queries of all texts, between two that are of none."""
        counts = [1, *(len(text.q) for text in self.texts)]
        starts = torch.tensor(counts).cumsum(0).int()
        lengths = torch.tensor([len(text.k) for text in self.texts], dtype=torch.int32)
        pages = torch.nn.utils.rnn.pad_sequence([t.pages for t in self.texts], True, -7)
        q = torch.cat([text.q for text in self.texts])
        q = torch.cat([q[:1], q, q[:1]]) if len(q) else q.new_ones((2, *q.shape[1:]))
        how = (q.shape[-1] ** -0.5, self.window, torch.float32, self.softcap)
        cache = self.cache if cache is None else cache
        return OPS.kv_attention_pages(q, *cache, pages, starts, lengths, *how)  # type: ignore[no-any-return]

    def alone(self, text: Text) -> Tensor:
        """What `kv_attention` gives this text."""
        length, heads, d = text.k.shape
        whole = kv_empty(1, heads, length, d, self.bits, self.bits)
        k, v, q = (t.transpose(0, 1)[None] for t in (text.k, text.v, text.q))
        OPS.kv_write(*whole, k, v, torch.arange(length))
        mask = visible(len(text.q), length, self.window)
        how = (d**-0.5, length, torch.float32, None, self.softcap)
        return OPS.kv_attention(q, *whole, mask, *how)[0].transpose(0, 1)  # type: ignore[no-any-return]


def _in_one_memory(pages: int, heads: int, tokens: int, d: int, bits: int) -> Cache:
    """The four tensors of each page and head, one behind the other, as servers keep them."""
    shapes = kv_shapes(pages, heads, tokens, d, bits, bits)
    sizes = [math.prod(shape[2:]) * dtype.itemsize for shape, dtype in shapes]
    memory = torch.zeros(pages, heads, sum(sizes), dtype=torch.uint8)
    parts = memory.split(sizes, -1)
    return tuple(
        part.view(dtype).view(shape) for part, (shape, dtype) in zip(parts, shapes, strict=True)
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Texts whose pages lie in any order, written token by token in any order."""
    torch.manual_seed(draw(SEEDS))
    d, bits, dtype = (
        draw(st.sampled_from([8, 40, 64, 128])),
        draw(st.sampled_from([8, 4])),
        draw(DTYPES),
    )
    heads, group, tokens = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 4)),
        draw(st.sampled_from([16, 48])),
    )
    lengths = draw(st.lists(st.sampled_from([0, 1, 15, 16, 17, 100, 700]), min_size=1, max_size=5))
    used = [-(-length // tokens) for length in lengths]
    order = torch.randperm(sum(used) + 2).int()
    texts, slots = [], []
    for length, own in zip(lengths, order[: sum(used)].split(used), strict=True):
        k, v = (torch.randn(length, heads, d).to(dtype) for _ in range(2))
        q = torch.randn(min(length, draw(st.integers(0, 20))), heads * group, d).to(dtype)
        texts.append(Text(k, v, q, own))
        slots.append(
            own.repeat_interleave(tokens)[:length].long() * tokens + torch.arange(length) % tokens
        )
    cache = _in_one_memory(len(order), heads, tokens, d, bits)
    shuffled = torch.randperm(sum(lengths))
    k, v = (torch.cat([text[i] for text in texts])[shuffled] for i in (0, 1))
    OPS.kv_write_pages(*cache, k, v, torch.cat(slots)[shuffled])
    return Case(
        cache, texts, bits, draw(st.sampled_from([0, 1, 7, 600])), draw(st.sampled_from([0.0, 1.5]))
    )


@given(ISAS, cases(), st.sampled_from([1, 2, 5]))
def test_a_text_has_the_bits_that_it_has_alone(isa: str, case: Case, threads: int) -> None:
    """In whatever pages it lies, whatever texts are beside it. A query of no text is 0."""
    with on_isa(isa), on_threads(threads):
        y = case.attend()
        expected = [torch.zeros_like(y[:1]), *map(case.alone, case.texts), torch.zeros_like(y[:1])]
        assert same_bits(y, torch.cat(expected))


@given(cases(), st.sampled_from([math.nan, math.inf]))
def test_other_pages_are_not_read(case: Case, fault: float) -> None:
    """Those of no text, and the places behind a text's last token."""
    held = torch.zeros(case.cache[1].shape[0] * case.cache[1].shape[2], dtype=torch.bool)
    tokens = case.cache[1].shape[2]
    for text in case.texts:
        places = torch.arange(len(text.k))
        held[text.pages.long()[places // tokens] * tokens + places % tokens] = True
    cache = tuple(t.clone() for t in case.cache)
    for scale in cache[1::2]:
        scale[~held.unflatten(0, (-1, tokens))[:, None].expand(scale.shape[:3])] = fault
    assert same_bits(case.attend(cache), case.attend())


# --- errors ---

K, Q = torch.zeros(3, 2, 8), torch.zeros(3, 4, 8)


def _write(cache: Cache, k: Tensor = K, v: Tensor = K, slots: object = (0, 40, -1)) -> None:
    OPS.kv_write_pages(*cache, k, v, torch.tensor(slots))


def _attend(
    cache: Cache,
    q: Tensor = Q,
    pages: object = ((0, 1), (2, 9)),
    starts: object = (0, 2, 3),
    lengths: object = (20, 5),
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    given = (torch.tensor(t, dtype=torch.int32) for t in (pages, starts, lengths))
    OPS.kv_attention_pages(q, *cache, *given, 1.0, window, torch.float32, softcap)


ERRORS: dict[str, tuple[Callable[[Cache], None], str]] = {
    "slot": (lambda c: _write(c, slots=[0, 48, 1]), "slots has 48, which is outside 0..47"),
    "before": (lambda c: _write(c, slots=[0, -2, 1]), "slots has -2, which is outside 0..47"),
    "slots": (lambda c: _write(c, slots=[0, 1]), "k has shape 3x2x8 and slots 2, expected Nx2x8"),
    "int": (lambda c: _write(c, slots=[0.0, 1.0, 2.0]), "slots has dtype Float, expected Long"),
    "double": (lambda c: _write(c, v=K.double()), "v has dtype Double"),
    "heads": (lambda c: _write(c, k=K[:, :1]), "k has shape 3x1x8"),
    "other pages": (
        lambda c: _write((*c[:2], *(t[:2] for t in c[2:]))),
        "keys are 3 pages of 2 heads and 16 tokens, but values 2 of 2 and 16",
    ),
    "one memory": (lambda c: _write((c[2].view(c[0].shape), c[1], *c[2:])), "share memory"),
    "no tokens": (
        lambda c: _write(kv_empty(3, 2, 0, 8)), "pages of 0 tokens, expected multiples of 16"
    ),
    "queries": (lambda c: _attend(c, Q[:, :3]), "q has shape 3x3x8, expected NxHqx8, Hq"),
    "page": (lambda c: _attend(c, pages=[[0, 3], [2, 9]]), "text 0 has page 3, which is outside"),
    "negative": (lambda c: _attend(c, pages=[[0, 1], [-1, 9]]), "text 1 has page -1"),
    "room": (lambda c: _attend(c, lengths=[33, 5]), "text 0 has 2 queries and 33 keys in 2 pages"),
    "few keys": (lambda c: _attend(c, lengths=[1, 5]), "text 0 has 2 queries and 1 keys"),
    "starts": (lambda c: _attend(c, starts=[0, 2, 1]), "starts has 1 behind 2"),
    "past": (lambda c: _attend(c, starts=[0, 2, 4]), "starts has 4 behind 2, expected .* of 3"),
    "shapes": (lambda c: _attend(c, starts=[0, 3]), "starts 2 and lengths 2, expected SxM,"),
    "window": (lambda c: _attend(c, window=-1), "window=-1, expected the number of keys"),
    "softcap": (lambda c: _attend(c, softcap=-1.0), "softcap=-1, expected a size of scores"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_sentences_and_write_nothing(name: str) -> None:
    call, sentence = ERRORS[name]
    cache = kv_empty(3, 2, 16, 8)
    with pytest.raises(RuntimeError, match=sentence):
        call(cache)
    assert not any(t.any() for t in cache)


def test_no_texts_and_no_tokens() -> None:
    cache = kv_empty(3, 2, 16, 8)
    OPS.kv_write_pages(*cache, K[:0], K[:0], torch.zeros(0, dtype=torch.int64))
    empty = torch.zeros(0, dtype=torch.int32)
    y = OPS.kv_attention_pages(
        Q, *cache, empty.view(0, 0), torch.zeros(1, dtype=torch.int32), empty, 1.0, 0, torch.float32
    )
    assert y.shape == Q.shape and not y.any()
