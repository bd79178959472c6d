"""Observers and samples of calibration: what they keep, whatever the batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qfx.calibration.observers import (
    BINS,
    OBSERVERS,
    Entropy,
    Histogram,
    MeanSquare,
    MovingAverage,
    Percentile,
    step_of,
)
from qfx.calibration.record import ActivationRecord
from qfx.ops.code import Code
from qfx.ops.quantize import code_range
from tests.lib.pairs import every

seeds = st.integers(0, 2**32)
bits = st.integers(2, 8)


def stream(seed: int, batches: int = 4, size: int = 300) -> list[Tensor]:
    """Batches of different magnitudes, one-sided ones among them."""
    random = torch.Generator().manual_seed(seed)
    magnitudes = 10.0 ** torch.randint(-2, 3, (batches,), generator=random)
    offsets = torch.randint(-2, 3, (batches,), generator=random).float()
    noise = torch.randn(batches, size, generator=random)
    return list((noise + offsets[:, None]) * magnitudes[:, None])


def watched(name: str, batches: list[Tensor], bits: int = 8, symmetric: bool = True):
    observer = OBSERVERS[name](bits, symmetric)
    for batch in batches:
        observer.update(batch)
    return observer


@given(seeds)
def test_minmax_is_that_of_all_batches(seed: int) -> None:
    batches = stream(seed)
    everything = torch.cat(batches)
    low, high = watched("minmax", batches).range()
    assert (low, high) == (min(everything.min(), 0), max(everything.max(), 0))


@given(seeds, st.floats(0, 0.99))
def test_moving_average_forgets_by_its_momentum(seed: int, momentum: float) -> None:
    batches, observer = stream(seed), MovingAverage(momentum)
    for batch in batches:
        observer.update(batch)
    ends = [(min(b.min().item(), 0), max(b.max().item(), 0)) for b in batches]
    for side in (0, 1):
        wanted = ends[0][side]
        for new in ends[1:]:
            wanted = momentum * wanted + (1 - momentum) * new[side]
        assert observer.range()[side] == pytest.approx(wanted)


def test_momentum_is_checked() -> None:
    with pytest.raises(ValueError, match=r"momentum=1 is outside 0 <= momentum < 1"):
        MovingAverage(1)


@given(seeds, st.permutations(range(4)))
def test_a_histogram_loses_nothing_and_forgets_the_order(seed: int, order: list[int]) -> None:
    batches, found = stream(seed), []
    for indices in (range(4), order):
        histogram = Histogram()
        for i in indices:
            histogram.update(batches[i])
        found.append(histogram)
    assert found[0].counts.sum() == sum(b.numel() for b in batches)
    assert found[0].limit == found[1].limit
    # an element on an edge may fall on either side of it
    assert (found[0].counts - found[1].counts).abs().sum() <= 8
    everything, width = torch.cat(batches), 2 * found[0].limit / BINS
    low, high = found[0].extremes()
    assert low == pytest.approx(min(everything.min().item(), 0), abs=width)
    assert high == pytest.approx(max(everything.max().item(), 0), abs=width)


@given(seeds, st.booleans())
def test_percentile_leaves_out_no_more_than_it_says(seed: int, symmetric: bool) -> None:
    batches = stream(seed, size=20_000)
    everything, observer = torch.cat(batches), watched("percentile", batches, 8, symmetric)
    low, high = observer.range()
    width = 2 * observer.histogram.limit / BINS
    slack = width * (0.001 if symmetric else 0.501)  # a range ends at edges of bins, or in them
    outside = ((everything < low - slack) | (everything > high + slack)).double().mean()
    assert outside <= 1 - Percentile.percentile / 100


@given(seeds, bits, st.booleans())
def test_the_mse_range_is_no_worse_than_the_full_one(seed: int, b: int, symmetric: bool) -> None:
    """On the values themselves, up to the width of a bin of the histogram."""
    batches = stream(seed)
    everything = torch.cat(batches).double()
    observer = watched("mse", batches, b, symmetric)

    def error(clipped: tuple[float, float]) -> float:
        scale, zero = step_of(*clipped, b, symmetric)
        q = ((everything / scale).round() + zero).clamp(*code_range(b, symmetric))
        return ((q - zero) * scale - everything).square().mean().sqrt().item()

    width = 2 * observer.histogram.limit / BINS
    full = watched("minmax", batches).range()
    assert error(observer.range()) <= error(full) + 2 * width


def test_clipping_observers_cut_off_a_lonely_outlier() -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.cat([torch.randn(50_000, generator=random), torch.tensor([100.0])])
    for kind in (Percentile, MeanSquare, Entropy):
        observer = kind(4, True)
        observer.update(x)
        assert 1 < observer.range()[1] < 50, kind


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("low", [-1.0, 0.0])
def test_entropy_cuts_nothing_off_where_all_values_are_alike(low: float, bits: int) -> None:
    """What is clipped counts at the ends of the range, which even values would not fit."""
    observer = Entropy(bits, low < 0)
    observer.update(torch.linspace(low, 1, 50_000))
    assert observer.range() == pytest.approx((low, 1), abs=0.01)


@pytest.mark.parametrize(
    "name, batch", every(OBSERVERS, [torch.zeros(0), torch.zeros(5), torch.tensor([torch.nan])])
)
def test_nothing_to_see_is_no_range(name: str, batch: Tensor) -> None:
    assert watched(name, [batch]).range() == (0.0, 0.0)


@pytest.mark.parametrize("name", OBSERVERS)
def test_a_range_holds_zero(name: str) -> None:
    low, high = watched(name, [torch.rand(1000) + 5], 8, False).range()
    assert low <= 0 < high


def test_steps_are_those_of_the_quantize_operator() -> None:
    x = torch.randn(1, 500)
    for symmetric in (True, False):
        _, scale, zero = torch.ops.qfx.quantize(x, list(Code(8, int(symmetric), per_tensor=1)))
        low, high = x.min().item(), x.max().item()
        mine = step_of(low, high, 8, symmetric)
        assert mine[0] == pytest.approx(scale.item(), rel=1e-6)
        assert mine[1] == zero.item()


def sampled(x: Tensor, cuts: list[int], room: int = 16) -> ActivationRecord:
    activation = ActivationRecord(x.shape[1], room)
    for part in x.tensor_split(cuts):
        activation.update(part)
    return activation


@given(seeds, st.lists(st.integers(0, 200), max_size=5))
def test_a_sample_depends_on_the_rows_alone(seed: int, cuts: list[int]) -> None:
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(seed))
    one, parts = sampled(x, []), sampled(x, sorted(cuts))
    assert torch.equal(one.sample, parts.sample)
    assert torch.equal(one.extreme, parts.extreme)
    assert one.rows == parts.rows == 200
    assert torch.equal(one.absmax, parts.absmax)


@given(seeds)
def test_shrinking_gives_the_smaller_sample(seed: int) -> None:
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(seed))
    small, shrunk = sampled(x, [100], room=8), sampled(x[:100], [], room=64)
    shrunk.shrink(8)
    shrunk.update(x[100:])
    assert torch.equal(small.sample, shrunk.sample)
    assert torch.equal(small.extreme, shrunk.extreme)


def test_the_largest_rows_stay_and_faulty_ones_do_not() -> None:
    x = torch.randn(1000, 4)
    x[123, 2], x[7, 1] = -1000.0, torch.inf
    activation = sampled(x, [500], room=8)
    assert torch.equal(activation.extreme, x[123:124])
    assert activation.rows == 999
    assert activation.absmax[2] == 1000
    assert activation.sample.isfinite().all()
