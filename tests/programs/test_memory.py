"""Where regions lie in a program's memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qfx.programs.memory import Region, RegionKind, lay_out

SPANS = st.tuples(st.integers(0, 200), st.integers(0, 20), st.integers(0, 9))


def _regions(spans: list[tuple[int, int, int]]) -> list[Region]:
    return [Region(RegionKind.OWN, size, None, first, first + more) for size, first, more in spans]


@given(st.lists(SPANS, max_size=30))
def test_regions_that_are_in_use_at_once_do_not_overlap(spans: list[tuple[int, int, int]]) -> None:
    regions = _regions(spans)
    begins, size = lay_out(regions)
    assert set(begins) == set(regions)
    for i, a in enumerate(regions):
        assert begins[a] % 64 == 0 and begins[a] >= 0 and begins[a] + a.bytes <= size
        for b in regions[:i]:
            apart = begins[a] + a.bytes <= begins[b] or begins[b] + b.bytes <= begins[a]
            assert apart or a.last < b.first or b.last < a.first or 0 in (a.bytes, b.bytes)


def test_a_chain_takes_the_memory_of_two() -> None:
    begins, size = lay_out(_regions([(64, step, 1) for step in range(2000)]))
    assert len(begins) == 2000 and size == 128


def test_no_regions_take_no_memory() -> None:
    assert lay_out([]) == ({}, 0)
