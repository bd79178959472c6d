"""Search: finds the candidates for each group of matmuls with one input (a scheme and a transform
each), and their errors.

The error of a matmul is the mean over the sampled rows of |y - y'|^2 / max(|y|^2, mean |y|^2),
where y is its output without bias. Noise in rows of little power counts as it does in the others,
and the few rows of huge power do not dominate. On SmolLM2, smoothing chosen by this error halves
the divergence that remains after rotation; smoothing chosen by |y - y'|^2 / |y|^2 reduces it by a
third.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qfx.calibration.observers import OBSERVERS, step_of
from qfx.calibration.record import SharedInput, Transform
from qfx.calibration.sensitivity import SampledCall
from qfx.cost.model import CostModel, Work
from qfx.host.autograd import without_autocast
from qfx.ops.single_tensors import dequantize, quantize
from qfx.ops.storage import stored_bytes
from qfx.values.rounding import Rounding
from qfx.values.scheme import PER_COLUMN, PER_ROW, QSpec, Scheme
from qfx.values.site_recipe import LEAST_INT8

STRENGTHS = (0.35, 0.5, 0.65, 0.8)  # strengths of smoothing that are tried
WEIGHT_ROWS = 2048
OUTLIERS = 8  # features of an activation that may stay float
_SMALLEST = 1e-5  # magnitudes below this are not smoothed


@dataclass(frozen=True)
class Candidate:
    """One way to quantize the matmuls of a group, its errors and its predicted time."""

    scheme: Scheme | None  # None: float
    transform: Transform
    errors: tuple[float, ...]  # of each site
    seconds: float  # predicted, sum over the sites
    reason: str = ""  # why the group stays float, or why its codes are rounded to nearest
    roundings: tuple[Rounding, ...] = ()  # of each site, if its codes are not rounded to nearest
    divergences: tuple[float, ...] = ()  # predicted, of each site, if requested
    bytes: int = 0  # of the stored weights of all sites

    @property
    def error(self) -> float:
        return sum(self.errors)

    @property
    def divergence(self) -> float:
        """The predicted change of the model's output, summed over the matmuls of the group;
        infinite if unknown."""
        total = sum(self.divergences) if self.divergences else math.inf
        return total if total == total else math.inf


@dataclass(frozen=True)
class _Problem:
    """The data by which the candidates of a group are compared. `x`: input rows. `weights`: the
    float weight of each matmul, or `WEIGHT_ROWS` of its rows. `exact`: the float outputs for `x`
    and these weights."""

    group: SharedInput
    x: Tensor
    weights: tuple[Tensor, ...]
    exact: tuple[Tensor, ...]

    @classmethod
    def of(cls, group: SharedInput, per_row: bool, x: Tensor | None = None) -> _Problem:
        """Returns the data for a group. `per_row`: each row of a weight is quantized by itself, so
        that a few rows can represent all. `x`: rows to use instead of the sampled ones."""
        weights = [reader.w_nk for reader in group.readers]
        if per_row:
            weights = [_some_rows(w) for w in weights]
        floats = tuple(w.float() for w in weights)
        x = group.activation.sample if x is None else x
        return cls(group, x, floats, tuple(x @ w.t() for w in floats))

    def errors(self, scheme: Scheme, transform: Transform, observer: str) -> tuple[float, ...]:
        return self.errors_of(Candidate(scheme, transform, (), 0.0), observer)

    def errors_of(self, candidate: Candidate, observer: str) -> tuple[float, ...]:
        """Returns the error of each matmul for this candidate."""
        noisy = self.noisy(candidate, observer)
        return tuple(map(relative_error, self.exact, noisy))

    def noisy(self, candidate: Candidate, observer: str) -> Iterator[Tensor]:
        """Yields the int8 output of each matmul. Uses the candidate's rounded weights if it has
        some, otherwise weights rounded to nearest."""
        scheme, transform, activation = candidate.scheme, candidate.transform, self.group.activation
        assert scheme is not None
        x_hat = transform.of(self.x)
        if scheme.x is not None:
            seen = transform.of(torch.cat([activation.sample, activation.extreme]))
            x_hat = rounded_activation(x_hat, scheme.x, observer, seen)
        given = candidate.roundings or [None] * len(self.weights)
        for w, rounding in zip(self.weights, given, strict=True):
            stored = quantize(transform.of_weight(w), scheme.w)
            if rounding is not None:
                codes = rounding.codes
                codes = _some_rows(codes) if scheme.w.axes == PER_ROW else codes
                stored = stored._replace(codes=codes)
            yield x_hat @ dequantize(stored).t() + transform.in_float(self.x, w)


def _some_rows(w_nk: Tensor) -> Tensor:
    return w_nk[:: max(-(-w_nk.shape[0] // WEIGHT_ROWS), 1)]


@without_autocast
def errors_of(group: SharedInput, candidate: Candidate, observer: str) -> tuple[float, ...]:
    """Returns the error of each matmul of the group, with the candidate's rounded weights."""
    assert candidate.scheme is not None
    per_row = candidate.scheme.w.axes == PER_ROW
    return _Problem.of(group, per_row).errors_of(candidate, observer)


@without_autocast
def costs_of_errors(
    group: SharedInput, candidates: Sequence[Candidate], observer: str, calls: Sequence[SampledCall]
) -> Tensor:
    """Returns sum_tu (d_t d_u) price_tu over rows t and u of these calls, float64 [candidates,
    matmuls], where d_t is the error in a matmul's output at row t, equation (D1). The result is 0
    for float candidates."""
    shape = (len(candidates), len(group.readers))
    result = torch.zeros(shape, dtype=torch.float64, device="cpu")
    int8 = [(i, c) for i, c in enumerate(candidates) if c.scheme]
    per_row = all(c.scheme.w.axes == PER_ROW for _, c in int8 if c.scheme)
    for call in calls if int8 else ():
        problem = _Problem.of(group, per_row, call.x)
        for i, candidate in int8:
            noisy = problem.noisy(candidate, observer)
            for j, (reader, other) in enumerate(zip(group.readers, noisy, strict=True)):
                d = (problem.exact[j] - other).double()
                rows = reader.w_nk.shape[0] / max(d.shape[1], 1)  # each row stands for this many
                price = call.price.get(reader.key)
                result[i, j] += torch.nan if price is None else rows * ((d @ d.t()) * price).sum()
    return result


@without_autocast
def candidates(
    group: SharedInput,
    schemes: Sequence[Scheme],
    observer: str,
    cost: CostModel,
    minimum_gain: float,
) -> list[Candidate]:
    """Returns the candidates of a group: float, and each scheme with its best strength of
    smoothing, and again with outlying features in float if there are some. Schemes whose predicted
    gain is below `minimum_gain` are left out.

    The first scheme is the requested one. If it is static, the others must save a tenth of its
    time.
    """
    times = [times_of(group, scheme, cost) for scheme in schemes]
    in_float, requested = times[0]
    gain = max(in_float / int8_s for _, int8_s in times)
    reason = "" if gain >= minimum_gain else f"int8 would be {gain:.2f}x float"
    nothing, size = (0.0,) * len(group.readers), bytes_of(group, None)
    found = [Candidate(None, Transform(), nothing, in_float, reason, bytes=size)]
    gaining = [
        (s, int8_s)
        for s, (_, int8_s) in zip(schemes, times, strict=True)
        if in_float / int8_s >= minimum_gain
    ]
    if not gaining:
        return found
    problem = _Problem.of(group, all(s.w.axes == PER_ROW for s, _ in gaining))
    for scheme, int8_s in gaining:
        fallback = schemes[0].calibrated and not scheme.calibrated
        seconds = max(requested, int8_s) * 1.1 if fallback else int8_s
        transform, errors = _best_smoothing(problem, scheme, observer)
        size = bytes_of(group, scheme)
        found.append(Candidate(scheme, transform, errors, seconds, bytes=size))
        if outliers := _outliers(group, scheme):
            transform = Transform(None, group.block(scheme), outliers)
            errors = problem.errors(scheme, transform, observer)
            beside = times_of(group, scheme, cost, len(outliers))[1] - int8_s
            found.append(Candidate(scheme, transform, errors, seconds + beside, bytes=size))
    return found


def bytes_of(group: SharedInput, scheme: Scheme | None) -> int:
    """Returns the bytes of the group's stored weights, not counting the few columns that are
    outliers."""
    weights = [reader.w_nk for reader in group.readers]
    if scheme is None:
        return sum(w.numel() * w.element_size() for w in weights)
    return sum(stored_bytes(scheme.w, scheme.group, *w.shape) for w in weights)


def _outliers(group: SharedInput, scheme: Scheme) -> tuple[int, ...]:
    """Returns the indices of the few features of x whose maximum exceeds ten times the median of
    all features' maxima."""
    if scheme.x is None or PER_COLUMN in (scheme.x.axes, scheme.w.axes):
        return ()
    absmax, k = group.activation.absmax, group.activation.k
    most = min(OUTLIERS, k // LEAST_INT8)
    if not most:
        return ()
    largest = absmax.topk(most)
    kept = largest.indices[largest.values > 10 * absmax.median()]
    return tuple(sorted(kept.tolist()))


def _best_smoothing(
    problem: _Problem, scheme: Scheme, observer: str
) -> tuple[Transform, tuple[float, ...]]:
    rotation = problem.group.block(scheme)
    transforms = [Transform(factor, rotation) for factor in _factors(problem.group, scheme)]
    tried = [(t, problem.errors(scheme, t, observer)) for t in transforms]
    return min(tried, key=lambda each: sum(each[1]))


def _factors(group: SharedInput, scheme: Scheme) -> Iterator[Tensor | None]:
    """Yields the smoothing factors to try, [K]: None, and 1 / s_k with s_k = x_k^a / w_k^(1 - a),
    where x_k and w_k are the sizes of feature k, for each strength a."""
    if scheme.x is not None and scheme.x.axes == PER_COLUMN:
        yield 1 / group.activation.absmax.clamp_min(_SMALLEST)
        return
    yield None
    if scheme.x is None or scheme.w.axes == PER_COLUMN:
        return
    for x, w in _sizes(group, scheme):
        if not bool((x > _SMALLEST).any()):
            continue
        for strength in STRENGTHS:
            factor = w.clamp_min(_SMALLEST) ** (1 - strength) / x.clamp_min(_SMALLEST) ** strength
            seen = x > _SMALLEST  # the size of a channel that is 0 in all batches is unknown
            near_1 = factor / factor[seen].log().mean().exp()  # changes nothing but rounding
            yield torch.where(seen, near_1, 1.0)


def _sizes(group: SharedInput, scheme: Scheme) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the sizes of each feature of x and of the weights, both [K].

    Without rotation the sizes are maxima, which determine the quantization steps (Xiao et al.,
    SmoothQuant, 2023). The maxima of rotated blocks follow the powers of the blocks, so with
    rotation the sizes are root mean squares. A static scale still depends on the most extreme row,
    so both are tried for static schemes. On SmolLM2 powers reduce the divergence that remains after
    smoothing and rotation from 0.0027 to 0.0023; trying both reduces the divergence of static
    scales from 0.0108 to 0.0101.
    """
    rotated = bool(group.block(scheme))
    if not rotated or (scheme.x is not None and scheme.x.static):
        yield group.activation.absmax, torch.stack([r.largest for r in group.readers]).amax(0)
    if rotated:
        powers = torch.stack([reader.power for reader in group.readers])
        yield group.activation.sample.square().mean(0).sqrt(), powers.mean(0).sqrt()


def relative_error(exact: Tensor, noisy: Tensor) -> float:
    """Returns the mean over rows of |y - y'|^2 / max(|y|^2, mean |y|^2)."""
    power = exact.square().sum(1)
    noise = (exact - noisy).square().sum(1)
    allowed = torch.maximum(power, power.mean()).clamp_min(1e-30)
    return (noise / allowed).mean().item() if power.numel() else 0.0


def rounded_activation(x: Tensor, spec: QSpec, observer: str, seen: Tensor) -> Tensor:
    """Returns x quantized and dequantized. A static scale is determined by the rows `seen`."""
    if not spec.static:
        return dequantize(quantize(x, spec))
    watch = OBSERVERS[observer](spec.bits, spec.symmetric)
    watch.update(seen)
    scale, zero_point = step_of(*watch.range(), spec.bits, spec.symmetric)
    step = torch.tensor([scale], dtype=torch.float32, device=x.device)
    zero = torch.tensor([zero_point], dtype=torch.int32, device=x.device)
    return dequantize(quantize(x, spec, step, zero))


def times_of(
    group: SharedInput, scheme: Scheme, cost: CostModel, outliers: int = 0
) -> tuple[float, float]:
    """Returns the predicted seconds of all matmuls of the group together, in float and in int8."""
    m, shapes = max(group.m, 1), [reader.w_nk.shape for reader in group.readers]
    works = [Work.linear(m, k, n, group.dtype, scheme, outliers) for n, k in shapes]
    each = [cost.estimate(work) for work in works]
    return sum(e.float_s for e in each), sum(e.int8_s for e in each)
