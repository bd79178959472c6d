"""Memory in huge pages holds what it held, and only what is mostly ours is asked for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qfx.io import huge_pages
from qfx.io.huge_pages import Room, _runs, into_huge_pages

SIZE = 1 << 21
BLOCKS = st.lists(
    st.tuples(st.integers(0, 8 * SIZE), st.integers(0, 3 * SIZE)), max_size=6
)  # addresses and bytes


@given(BLOCKS)
def test_pages_that_blocks_mostly_cover(blocks: list[tuple[int, int]]) -> None:
    separate, end = [], 0
    for start, count in sorted(blocks):  # memory is not given twice
        start = max(start, end)
        separate.append((start, count))
        end = start + count
    asked = {p for first, count in _runs(separate, SIZE) for p in range(first, first + count, SIZE)}
    for page in range(0, 40 * SIZE, SIZE):
        parts = [min(s + n, page + SIZE) - max(s, page) for s, n in separate]
        assert (page in asked) == (2 * sum(p for p in parts if p > 0) >= SIZE)


@given(BLOCKS)
def test_a_page_is_asked_for_once(blocks: list[tuple[int, int]]) -> None:
    runs = _runs(blocks + blocks, SIZE)
    assert all(first % SIZE == count % SIZE == 0 < count for first, count in runs)
    assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(runs))


@pytest.fixture(params=[0, SIZE])
def _page(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    if request.param and not huge_pages.huge_page_size():
        pytest.skip("this system has no huge pages, or none that may be asked for")
    monkeypatch.setattr(huge_pages, "huge_page_size", lambda: request.param)
    yield request.param


def test_memory_holds_what_it_held(_page: int) -> None:
    x = torch.arange(3 * SIZE, dtype=torch.int64)
    there = x.data_ptr(), x.nbytes
    assert 0 <= into_huge_pages([there, there]) <= (x.nbytes if _page else 0)
    assert there == (x.data_ptr(), x.nbytes) and torch.equal(x, torch.arange(3 * SIZE))


def test_tensors_in_one_room(_page: int) -> None:
    shapes = [
        ((3, 5), torch.int8),
        ((), torch.float64),
        ((0, 2), torch.bfloat16),
        ((700,), torch.int16),
    ]
    room = Room.of(torch.empty(shape, dtype=dtype).nbytes for shape, dtype in shapes)
    made = [room.empty(shape, dtype) for shape, dtype in shapes]
    for value, (tensor, (shape, dtype)) in enumerate(zip(made, shapes, strict=True)):
        assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0 or tensor.numel() == 0
        tensor.fill_(value + 1)
    assert all(bool((t == value + 1).all()) for value, t in enumerate(made))
