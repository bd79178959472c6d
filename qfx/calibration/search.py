"""Search: for each group of sites the candidates, a scheme and a transform, and their errors.

The error of a site is the mean over the sampled rows of |y - y'|^2 / |y|^2, y its output without
bias: every token counts the same, whatever its magnitude.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qfx.calibration.observers import OBSERVERS, step_of
from qfx.calibration.record import Group, Transform
from qfx.ops.quantize import dequantize, quantize_static
from qfx.plan import CostModel
from qfx.scheme import PER_COLUMN, QSpec, Scheme

STRENGTHS = (0.35, 0.5, 0.65, 0.8)  # of smoothing
_SMALLEST = 1e-5  # magnitudes below this are not smoothed


@dataclass(frozen=True)
class Candidate:
    """One way to quantize the sites of a group, and what it costs."""

    scheme: Scheme | None  # None: float
    transform: Transform
    errors: tuple[float, ...]  # of each site
    seconds: float  # predicted, of all sites
    reason: str = ""  # of float

    @property
    def error(self) -> float:
        return sum(self.errors)


def candidates(
    group: Group, schemes: Sequence[Scheme], observer: str, cost: CostModel, minimum_gain: float
) -> list[Candidate]:
    """The group in float, and every scheme with the best strength of smoothing for it, those left
    out whose predicted gain is below `minimum_gain`."""
    weights = [reader.w_nk.float() for reader in group.readers]
    times = [_times(group, weights, scheme, cost) for scheme in schemes]
    in_float = times[0][0]
    gain = max(in_float / int8_s for _, int8_s in times)
    reason = "" if gain >= minimum_gain else f"int8 would be {gain:.2f}x float"
    found = [Candidate(None, Transform(), (0.0,) * len(weights), in_float, reason)]
    for scheme, (_, int8_s) in zip(schemes, times, strict=True):
        if in_float / int8_s >= minimum_gain:
            errors, transform = _best_smoothing(group, weights, scheme, observer)
            found.append(Candidate(scheme, transform, errors, int8_s))
    return found


def _best_smoothing(
    group: Group, weights: list[Tensor], scheme: Scheme, observer: str
) -> tuple[tuple[float, ...], Transform]:
    rotation = scheme.block(group.activation.k)
    transforms = [Transform(factor, rotation) for factor in _factors(group, weights, scheme)]
    tried = [(_errors(group, weights, scheme, t, observer), t) for t in transforms]
    return min(tried, key=lambda each: sum(each[0]))


def _factors(group: Group, weights: list[Tensor], scheme: Scheme) -> Iterator[Tensor | None]:
    """None, and 1 / s_k with s_k = max|x_k|^a / max|w_k|^(1 - a).

    Source: Xiao et al., SmoothQuant, 2023.
    """
    absmax = group.activation.absmax.clamp_min(_SMALLEST)
    if scheme.x is None:
        yield None
        return
    if scheme.x.axes == PER_COLUMN:
        yield 1 / absmax
        return
    yield None
    largest = torch.stack([w.abs().amax(0) for w in weights]).amax(0).clamp_min(_SMALLEST)
    for strength in STRENGTHS:
        factor = largest ** (1 - strength) / absmax**strength
        yield factor / factor.log().mean().exp()  # near 1, which changes nothing but rounding


def _errors(
    group: Group, weights: list[Tensor], scheme: Scheme, transform: Transform, observer: str
) -> tuple[float, ...]:
    x = group.activation.sample
    x_hat, extreme = transform.of(x), transform.of(group.activation.extreme)
    if scheme.x is not None:
        x_hat = rounded_activation(x_hat, scheme.x, observer, extreme)
    rounded = [rounded_weight(transform.of_weight(w), scheme.w) for w in weights]
    return tuple(
        relative_error(x @ w.t(), x_hat @ w_hat.t())
        for w, w_hat in zip(weights, rounded, strict=True)
    )


def relative_error(exact: Tensor, noisy: Tensor) -> float:
    """The mean over rows of |y - y'|^2 / |y|^2."""
    power = exact.square().sum(1)
    noise = (exact - noisy).square().sum(1)
    return (noise / power.clamp_min(1e-30)).mean().item() if power.numel() else 0.0


def rounded_activation(x: Tensor, spec: QSpec, observer: str, extreme: Tensor) -> Tensor:
    """The values that the codes of x stand for; a static range is that of x and `extreme`."""
    if not spec.static:
        return _fake(x, spec)
    watch = OBSERVERS[observer](spec.bits, spec.symmetric)
    watch.update(torch.cat([x, extreme]))
    scale, zero_point = step_of(*watch.range(), spec.bits, spec.symmetric)
    steps = torch.tensor([scale]), torch.tensor([zero_point], dtype=torch.int32)
    codes = quantize_static(x, *steps, spec.bits, spec.symmetric)
    return dequantize(*codes, None, None, "none", torch.float32)


def rounded_weight(w_nk: Tensor, spec: QSpec) -> Tensor:
    """The values that the codes of a weight stand for."""
    if spec.axes == PER_COLUMN:
        return _fake(w_nk.t(), replace(spec, axes=(1,))).t()
    n, k = w_nk.shape
    if not spec.group or spec.group >= k:
        return _fake(w_nk, spec)
    padded = torch.nn.functional.pad(w_nk, (0, -k % spec.group))
    return _fake(padded.reshape(-1, spec.group), spec).reshape(n, -1)[:, :k]


def _fake(x: Tensor, spec: QSpec) -> Tensor:
    how = (list(spec.axes), spec.bits, spec.symmetric)
    return torch.ops.qfx.fake_quantize(x.contiguous(), *how, torch.float32)


def _times(
    group: Group, weights: list[Tensor], scheme: Scheme, cost: CostModel
) -> tuple[float, float]:
    """Predicted seconds of all sites, in float and in int8."""
    m = max(group.m, 1)
    each = [cost.estimate(m, w.shape[1], w.shape[0], group.dtype, scheme) for w in weights]
    return sum(e.float_s for e in each), sum(e.int8_s for e in each)
