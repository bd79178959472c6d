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

    @property
    def error(self) -> float:
        return sum(self.errors)


def candidates(
    group: Group, schemes: Sequence[Scheme], observer: str, cost: CostModel
) -> Iterator[Candidate]:
    """Every scheme with the best strength of smoothing for it; and the group in float."""
    weights = [reader.w_nk.float() for reader in group.readers]
    for scheme in schemes:
        yield _best_smoothing(group, weights, scheme, observer, cost)
    seconds = sum(_estimate(group, w, schemes[0], cost)[0] for w in weights)
    yield Candidate(None, Transform(), (0.0,) * len(weights), seconds)


def _best_smoothing(
    group: Group, weights: list[Tensor], scheme: Scheme, observer: str, cost: CostModel
) -> Candidate:
    seconds = sum(_estimate(group, w, scheme, cost)[1] for w in weights)
    rotation = scheme.block(group.activation.k)
    tried = [
        (_errors(group, weights, scheme, Transform(factor, rotation), observer), factor)
        for factor in _factors(group, weights, scheme)
    ]
    errors, factor = min(tried, key=lambda each: sum(each[0]))
    return Candidate(scheme, Transform(factor, rotation), errors, seconds)


def _factors(group: Group, weights: list[Tensor], scheme: Scheme) -> Iterator[Tensor | None]:
    """None, and 1 / s_k with s_k = max|x_k|^a / max|w_k|^(1 - a): SmoothQuant, Xiao et al. (2023)."""
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
    x_hat = transform.of(x)
    if scheme.x is not None:
        x_hat = rounded_activation(x_hat, scheme.x, observer, transform.of(group.activation.extreme))
    return tuple(
        relative_error(x @ w.t(), x_hat @ rounded_weight(transform.of_weight(w), scheme.w).t())
        for w in weights
    )


def relative_error(exact: Tensor, noisy: Tensor) -> float:
    """The mean over rows of |y - y'|^2 / |y|^2."""
    power = exact.square().sum(1)
    noise = (exact - noisy).square().sum(1)
    return (noise / power.clamp_min(1e-30)).mean().item() if power.numel() else 0.0


def rounded_activation(x: Tensor, spec: QSpec, observer: str, extreme: Tensor) -> Tensor:
    """The values that the codes of x stand for; a static range is that of x and its extreme rows."""
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


def _estimate(group: Group, w: Tensor, scheme: Scheme, cost: CostModel) -> tuple[float, float]:
    """Predicted seconds of a site in float and in int8."""
    n, k = w.shape
    found = cost.estimate(max(group.m, 1), k, n, group.dtype, scheme)
    return found.float_s, found.int8_s
