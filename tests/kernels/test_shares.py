"""How products are shared out among threads (csrc/cpu/gemm/grid.h), on more of them than there are
here: thread i of T computes share i, so the longest share says when all are done."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import qfx._C as _C
from tests.lib.pairs import pairs

Share = list[tuple[int, int, int, int, int]]  # product, first row, end, first panel, end
FORMATS = {"amx": (32, 256), "avx512vnni": (12, 240), "avxvnni": (6, 240), "avx2": (4, 240)}
ROWS, COLUMNS = (1, 5, 16, 37, 128, 197, 512, 1024, 4096), (32, 768, 3072, 16384)
# Formats, products, rows, columns.
SHAPES = [
    *[(isa, 1, m, n) for isa, m, n in pairs(FORMATS, ROWS, COLUMNS)],
    *[(isa, b, m, m) for isa, b, m in pairs(FORMATS, (2, 12, 17, 96), (64, 197, 512))],
]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def rows_and_panels(share: Share) -> int:
    return sum((end - begin) * (last - first) for _, begin, end, first, last in share)


def cost(share: Share, tallest: int) -> int:
    """As grid.cpp counts: a panel that passes by costs half a tile besides."""
    passing = ceil_div(tallest, 2)
    return sum((end - begin + passing) * (last - first) for _, begin, end, first, last in share)


@given(
    st.integers(1, 5), st.integers(1, 600), st.integers(1, 40), st.integers(1, 32),
    st.integers(1, 300), st.integers(1, 96),
)  # fmt: skip
@example(1, 25, 1, 12, 12, 1)  # what is left of the rows is cheaper than one block of them
def test_shares_hold_every_row_and_panel_once_and_the_same_cost(
    products: int, rows: int, panels: int, tallest: int, block_rows: int, threads: int
) -> None:
    shares = _C.product_shares(products, rows, panels, tallest, block_rows, threads)
    assert len(shares) == threads
    seen = torch.zeros(products, rows, panels, dtype=torch.int32)
    tile = ceil_div(rows, ceil_div(rows, tallest))
    whole = _C.product_shares(products, rows, panels, tallest, block_rows, 1)[0]
    for product, begin, end, first, last in chain.from_iterable(shares):
        assert begin < end and first < last
        seen[product, begin:end, first:last] += 1
        uncut = any(task[1:3] == (begin, end) for task in whole)
        assert uncut or (begin % tile == 0 and end in (rows, ceil_div(end, tile) * tile))
    assert bool((seen == 1).all())
    # A fair share and a sixteenth; or in blocks of one tile, where a greedy line of them ends.
    lone = products * panels * (rows + ceil_div(rows, tile) * ceil_div(tallest, 2))
    unit = tile + ceil_div(tallest, 2)
    most = max(cost(share, tallest) for share in shares)
    fair = ceil_div(cost(whole, tallest), threads)
    assert most <= max(fair + fair // 16, ceil_div(lone, threads) + unit)


@pytest.mark.parametrize("isa", FORMATS)
def test_one_thread_has_one_share_in_blocks_as_the_caches_like_them(isa: str) -> None:
    tallest, block_rows = FORMATS[isa]
    for rows in (1, 128, 512, 4096):
        (share,) = _C.product_shares(1, rows, 24, tallest, block_rows, 1)
        assert {task[3:] for task in share} == {(0, 24)}
        height = share[0][2]
        assert [task[1] for task in share] == list(range(0, rows, height))
        assert rows <= height or (height % tallest == 0 and height < block_rows + tallest)


@pytest.mark.parametrize("isa, products, rows, columns", SHAPES)
def test_threads_end_together_where_there_are_tiles_enough(
    isa: str, products: int, rows: int, columns: int
) -> None:
    """Of 1 to 96: the longest share is above the mean by half at most where there are 4 tiles a
    thread, by a quarter with 16, by an eighth with 64. In the median of all it is by 3 %."""
    tallest, block_rows = FORMATS[isa]
    panels = ceil_div(columns, 32)
    for threads in range(1, 97):
        shares = _C.product_shares(products, rows, panels, tallest, block_rows, threads)
        ratio = max(map(rows_and_panels, shares)) * threads / (products * rows * panels)
        each = products * ceil_div(rows, tallest) * panels / threads
        bounds = [1 + 1 / tiles**0.5 for tiles in (4, 16, 64) if each >= tiles]
        assert ratio <= min(bounds, default=ratio), (threads, each, ratio)


@given(
    st.integers(1, 80), st.integers(1, 200), st.integers(1, 32), st.integers(1, 20000),
    st.integers(1, 128),
)  # fmt: skip
@example(1, 24, 12, 3072, 8)  # shares are equal as it is
def test_k_is_cut_where_that_saves_a_fifth_and_into_parts_of_some_length(
    rows: int, panels: int, tallest: int, k: int, threads: int
) -> None:
    parts = _C.k_parts(rows, panels, tallest, 240, k, threads)
    assert parts == 1 or k >= 512 * parts
    shares = _C.product_shares(1, rows, panels, tallest, 240, threads)
    longest = max(cost(share, tallest) for share in shares)
    one = rows + ceil_div(tallest, 2)  # a panel
    assert parts == 1 or ceil_div(panels * parts, threads) * one / parts < 0.8 * longest


@pytest.mark.parametrize(
    "k, n, threads, before, after",
    [(4096, 4096, 96, 2, 1.5), (3072, 768, 96, 1, 0.25),
     (2048, 2048, 96, 1, 2 / 3), (4096, 4096, 64, 2, 2)],
)  # fmt: skip
def test_a_thread_has_at_most_so_many_panels_of_one_row(
    k: int, n: int, threads: int, before: float, after: float
) -> None:
    panels = n // 32
    parts = _C.k_parts(1, panels, 12, 240, k, threads)
    assert ceil_div(panels, threads) == before
    assert ceil_div(panels * parts, threads) / parts == after


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 16, 64, 96])
def test_a_batch_ends_together_on_all_threads(threads: int) -> None:
    """Of products long enough: whole ones in rounds, then the rest, shared by all threads."""
    for batch in range(1, 200):
        whole = _C.whole_products(batch, 1 << 30, threads)
        rounds, left = ceil_div(whole, threads), batch - whole
        assert 0 <= left < threads
        assert rounds + left / threads <= 1.125 * batch / threads, (batch, whole)
    assert _C.whole_products(2, 1 << 30, 16) == 0


def test_small_products_wake_no_team_of_their_own() -> None:
    """Less than the 5 microseconds that waking takes: 2^19 steps."""
    assert _C.whole_products(1, 1 << 18, 16) == 1
    assert _C.whole_products(17, 1 << 19, 16) == 17
    assert _C.whole_products(17, 1 << 21, 16) == 16


def test_a_product_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="each number is 1 or more"):
        _C.product_shares(1, 0, 24, 12, 240, 2)
    with pytest.raises(ValueError, match="each number is 1 or more"):
        _C.k_parts(1, 24, 12, 240, 0, 2)
