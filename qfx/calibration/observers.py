"""Observers: determine the range of an activation for a static scale, in bounded memory.

Each observer takes tensors by `update` and returns `(low, high)` by `range`; the range contains
zero. The observers that clip use a `Histogram`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from qfx.ops.quantize import SMALLEST_SCALE, code_range

BINS = 4096  # of a histogram, of equal width
_FRACTIONS = 128  # clipping ranges that a search tries


class Observer(Protocol):
    def update(self, x: Tensor) -> None: ...

    def range(self) -> tuple[float, float]: ...


class MinMax:
    """An observer whose range extends from the smallest to the largest value observed."""

    def __init__(self) -> None:
        self.low = self.high = 0.0

    def update(self, x: Tensor) -> None:
        low, high = _extremes(x)
        self.low, self.high = min(self.low, low), max(self.high, high)

    def range(self) -> tuple[float, float]:
        return self.low, self.high


class MovingAverage:
    """An observer whose range is an exponential average of the extremes b of each batch: a <-
    momentum a + (1 - momentum) b."""

    def __init__(self, momentum: float = 0.9) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"MovingAverage: momentum={momentum} is outside 0 <= momentum < 1")
        self.momentum = momentum
        self.seen: tuple[float, float] | None = None

    def update(self, x: Tensor) -> None:
        new, m = _extremes(x), self.momentum
        old = self.seen or new
        self.seen = (m * old[0] + (1 - m) * new[0], m * old[1] + (1 - m) * new[1])

    def range(self) -> tuple[float, float]:
        return self.seen or (0.0, 0.0)


class Histogram:
    """Counts values in `BINS` bins of [-limit, limit]. The limit, a power of two, doubles as values
    grow: pairs of bins merge, so no count is lost and the result does not depend on the order of
    batches."""

    def __init__(self) -> None:
        self.limit = 0.0
        self.counts = torch.zeros(BINS, dtype=torch.float64, device="cpu")

    def update(self, x: Tensor) -> None:
        x = x.detach().reshape(-1).float()
        x = x[x.isfinite()]
        largest = x.abs().max().item() if x.numel() else 0.0
        if largest == 0.0:
            self.counts[BINS // 2] += x.numel()
            return
        self._grow(2.0 ** (math.frexp(largest)[1]))
        self.counts += torch.histc(x, BINS, -self.limit, self.limit).double()

    def _grow(self, limit: float) -> None:
        self.limit = self.limit or limit
        while self.limit < limit:
            middle = self.counts.reshape(-1, 2).sum(1)
            self.counts = torch.zeros_like(self.counts)
            self.counts[BINS // 4 : 3 * BINS // 4] = middle
            self.limit *= 2

    @property
    def centres(self) -> Tensor:
        width = 2 * self.limit / BINS
        return (torch.arange(BINS, dtype=torch.float64, device="cpu") + 0.5) * width - self.limit

    def extremes(self) -> tuple[float, float]:
        """Returns the outer edges of the outermost bins that are not empty, extended to include
        zero."""
        full, width = self.counts.nonzero().reshape(-1), 2 * self.limit / BINS
        if not full.numel():
            return 0.0, 0.0
        low, high = full[0].item() * width, (full[-1].item() + 1) * width
        return min(low - self.limit, 0.0), max(high - self.limit, 0.0)


class _Clipping:
    """An observer whose range is chosen from a histogram."""

    def __init__(self, bits: int = 8, symmetric: bool = True) -> None:
        self.bits, self.symmetric = bits, symmetric
        self.histogram = Histogram()

    def update(self, x: Tensor) -> None:
        self.histogram.update(x)

    def range(self) -> tuple[float, float]:
        """Returns the range with the smallest `loss`, among the full range multiplied by each of a
        fixed set of fractions."""
        low, high = self.histogram.extremes()
        if low == high:
            return low, high
        if self.symmetric:
            low, high = -max(-low, high), max(-low, high)
        fractions = [i / _FRACTIONS for i in range(_FRACTIONS, _FRACTIONS // 16, -1)]
        return min(((low * f, high * f) for f in fractions), key=self.loss)

    def loss(self, clipped: tuple[float, float]) -> float:
        raise NotImplementedError


class Percentile(_Clipping):
    """An observer whose range is the narrowest that leaves out at most `100 - percentile` percent
    of the values."""

    percentile = 99.99

    def range(self) -> tuple[float, float]:
        counts, centres = self.histogram.counts, self.histogram.centres
        allowed = counts.sum() * (1 - self.percentile / 100)
        low, high = self.histogram.extremes()
        if self.symmetric:
            folded = counts[BINS // 2 :] + counts[: BINS // 2].flip(0)
            edge = _cut(folded, allowed) * 2 * self.histogram.limit / BINS
            return -edge, edge
        half = allowed / 2
        inside = (counts.cumsum(0) > half) & (counts.flip(0).cumsum(0).flip(0) > half)
        kept = centres[inside]
        if not kept.numel():
            return low, high
        return min(kept[0].item(), 0.0), max(kept[-1].item(), 0.0)


class MeanSquare(_Clipping):
    """An observer whose range has the least mean square error of the quantized values."""

    def loss(self, clipped: tuple[float, float]) -> float:
        values, counts = self.histogram.centres, self.histogram.counts
        error = values - _rounded(values, clipped, self.bits, self.symmetric)
        return (counts * error.square()).sum().item()


class Entropy(_Clipping):
    """An observer whose range makes the distribution of the quantized values diverge least from
    that of the values (Kullback-Leibler).

    Source: Migacz, 8-bit inference with TensorRT (2017). Clipped values count at the edges of the
    reference; within a code, the quantized distribution is uniform over the bins that are not
    empty.
    """

    def loss(self, clipped: tuple[float, float]) -> float:
        values, counts = self.histogram.centres, self.histogram.counts
        inside = (values >= clipped[0]) & (values <= clipped[1])
        if not inside.any():
            return math.inf
        reference = counts[inside].clone()
        reference[0] += counts[values < clipped[0]].sum()
        reference[-1] += counts[values > clipped[1]].sum()
        occurrences = counts[inside]
        codes = _codes(values[inside], clipped, self.bits, self.symmetric).long()
        codes -= codes.min()
        size = int(codes.max()) + 1
        mass = occurrences.new_zeros(size).index_add_(0, codes, occurrences)
        bins = occurrences.new_zeros(size).index_add_(0, codes, (occurrences > 0).double())
        quantized = torch.where(occurrences > 0, (mass / bins.clamp_min(1))[codes], 0)
        p, q = reference / reference.sum(), quantized / quantized.sum().clamp_min(1e-300)
        positive = p > 0
        return (p[positive] * (p[positive] / q[positive].clamp_min(1e-12)).log()).sum().item()


OBSERVERS: dict[str, Callable[[int, bool], Observer]] = {
    "minmax": lambda bits, symmetric: MinMax(),
    "moving-average": lambda bits, symmetric: MovingAverage(),
    "percentile": Percentile,
    "mse": MeanSquare,
    "entropy": Entropy,
}


def step_of(low: float, high: float, bits: int, symmetric: bool) -> tuple[float, int]:
    """Returns (scale, zero point) for quantizing the range [low, high], which contains zero, to
    `bits` bits, equations (Q1) and (Q2)."""
    qmin, qmax = code_range(bits, symmetric)
    if symmetric:
        return max(max(-low, high) / qmax, SMALLEST_SCALE), 0
    scale = max(high / (qmax - qmin) - low / (qmax - qmin), SMALLEST_SCALE)
    return scale, min(max(qmin - round(low / scale), qmin), qmax)


def _extremes(x: Tensor) -> tuple[float, float]:
    """Returns the minimum and the maximum of the finite elements of x and zero."""
    x = x.detach()
    x = x[x.isfinite()]
    if not x.numel():
        return 0.0, 0.0
    low, high = x.aminmax()
    return min(low.item(), 0.0), max(high.item(), 0.0)


def _cut(folded: Tensor, allowed: Tensor) -> int:
    """Returns the number of bins, counted from zero, beyond which at most `allowed` values lie."""
    beyond = folded.flip(0).cumsum(0).flip(0)  # the count in this bin and all farther out
    return int((beyond > allowed).sum())


def _codes(values: Tensor, clipped: tuple[float, float], bits: int, symmetric: bool) -> Tensor:
    scale, zero_point = step_of(*clipped, bits, symmetric)
    return ((values / scale).round() + zero_point).clamp(*code_range(bits, symmetric))


def _rounded(values: Tensor, clipped: tuple[float, float], bits: int, symmetric: bool) -> Tensor:
    scale, zero_point = step_of(*clipped, bits, symmetric)
    return (_codes(values, clipped, bits, symmetric) - zero_point) * scale
