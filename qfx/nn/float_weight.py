"""Writes floats to the quantized weight of a `qfx.nn.Linear`, for example to merge an adapter.

The floats are quantized in such a way that small changes are not lost. A write that undoes an
earlier change, such as removing the adapter, restores the earlier codes exactly. Equation (Q13).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qfx.host.autograd import without_autocast
from qfx.host.tensors import has_values
from qfx.nn.frozen import Frozen, float_weight
from qfx.ops.packing import Packing
from qfx.ops.quantize import code_range
from qfx.ops.rotation import transformed_weight
from qfx.ops.single_tensors import sqnr
from qfx.ops.storage import Values, packed_values, values_of
from qfx.values.scheme import PER_COLUMN, PER_ROW, PER_TENSOR, Scheme
from qfx.weights.cache import pack

log = logging.getLogger(__name__)
KEPT = 4  # number of writes that can be undone, the last one first


class PreviousWeight(NamedTuple):
    """A quantized weight as it was before a write, so that the write can be undone. `frozen`: its
    tensors. `change` [N, 8]: a fingerprint of the change that was written. `before`: the number of
    earlier writes."""

    frozen: Frozen
    change: Tensor
    before: int


@without_autocast
@torch.no_grad()
def weight_after_write(
    value: Tensor,
    now: Frozen,
    earlier: tuple[PreviousWeight, ...],
    scheme: Scheme,
    rounding: float = 0.0,
) -> tuple[Frozen, tuple[PreviousWeight, ...]]:
    """Returns the quantized weight after the floats `value` [N, K] are written to the weight `now`,
    and the former weights that are needed to undo writes.

    `rounding`: the relative rounding error of the dtype in which `value` was computed; 0 for
    float32. Logs which percentage of the change remains after rounding to codes.
    """
    value, stored = value.detach().float(), float_weight(now, scheme, *value.shape)
    change = total = _projected(value - stored)
    slack = 2.0**-16 * value.shape[1] ** 0.5 * (value.norm(dim=1) + stored.norm(dim=1))[:, None]
    if bool((total.abs() <= slack).all()):
        return now, earlier
    for i in reversed(range(len(earlier))):
        total = total + earlier[i].change
        exact = bool((total.abs() <= slack).all())
        if exact or _lost_in_rounding(total, change, rounding, value, stored):
            return earlier[i].frozen, earlier[:i]
    count = earlier[-1].before + 1 if earlier else 0
    made = _quantized(value, stored, now, scheme, count)
    _log_change(value, stored, float_weight(made, scheme, *value.shape))
    return made, (*earlier, PreviousWeight(now, change, count))[-KEPT:]


def _lost_in_rounding(
    total: Tensor, change: Tensor, rounding: float, value: Tensor, stored: Tensor
) -> bool:
    """Whether the rounding of two sums in a 16-bit dtype explains the difference `total` [N, 8]
    from an earlier weight, and the last write undoes most of the earlier changes. Equation
    (Q13)."""
    left, sizes = total.square().sum(), value.square().sum() + stored.square().sum()
    expected = total.shape[1] * rounding**2 * sizes
    return bool(left <= expected and left <= change.square().sum() / 2)


def _projected(change: Tensor) -> Tensor:
    """Returns the sums of each row of `change` [N, K] under 8 fixed patterns of random signs, [N,
    8]. These sums are a fingerprint by which changes are recognized. Equation (Q13)."""
    minus = _uniform((change.shape[1], 8), 1, change.device) < 0.5
    return change @ (1 - 2 * minus.float())


def _uniform(shape: Sequence[int], seed: int, device: torch.device) -> Tensor:
    """Returns float32 random numbers in [0, 1) that are the same on every device."""
    random = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=random, dtype=torch.float32, device="cpu").to(device)


def check_written(value: Any, n: int, k: int, stored: Tensor) -> None:
    """Raises TypeError or ValueError unless `value` is a float weight [n, k] with values, on the
    device of `stored`."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"Linear: the weight that is written is {kind}, expected a float tensor")
    if value.shape != (n, k) or value.device != stored.device or not has_values(value):
        raise ValueError(
            f"Linear: the weight that is written is {list(value.shape)} on {value.device}, "
            f"expected values {[n, k]} on {stored.device}"
        )


def nearest(value: Tensor, now: Frozen, scheme: Scheme) -> Frozen:
    """Returns the quantized weight after the floats `value` [N, K] are loaded: their nearest codes,
    independent of the earlier weight `now`. The quantization of inputs stays the same. Equations
    (R1) (Q1)-(Q3)."""
    return _requantized(value.detach().float(), now, scheme)


def _quantized(value: Tensor, stored: Tensor, now: Frozen, scheme: Scheme, count: int) -> Frozen:
    """Quantizes the floats `value` [N, K] that are written to a weight with the floats `stored`.
    Equation (Q13).

    Rows that change by less than half a step keep their scale if possible and are rounded
    stochastically: rounding values on the grid to the nearest code would lose the change. Each of
    several writes uses different random numbers, so that rounding errors do not add up, for example
    in a moving average.
    """
    made = _requantized(value, now, scheme)
    if made.factor is not now.factor:  # the grids cannot be compared
        return made
    change = transformed_weight(value - stored, now.factor, scheme.rotation)
    kind = (scheme.w, scheme.group)
    before, after = (values_of(each.packed, *kind, *value.shape) for each in (now, made))
    small = change.square().mean(1) < _expanded(before.scale, value, scheme).square().mean(1) / 4
    wanted = transformed_weight(value, now.factor, scheme.rotation)
    keep = small & _codes_under(before, wanted, scheme)[1].all(1)
    if scheme.w.axes != PER_ROW and not scheme.w.grouped:  # one scale for all
        keep = keep.all().expand_as(keep)
    if before.minimum is not None and bool((before.minimum != 0).any()):
        keep = torch.zeros_like(keep)  # one weight has zero points or minimums, not both
    grids = zip(before[1:], after[1:], strict=True)
    mixed = [None if t is None else _rows_of(keep, t, new) for t, new in grids]
    grid = Values(after.codes, *mixed)
    dither = _uniform(value.shape, 2 + count, value.device) - 0.5
    dither = torch.where(small[:, None], dither, 0.0)
    codes = _codes_under(grid, wanted, scheme, dither)[0]
    return made._replace(packed=packed_values(grid._replace(codes=codes), *kind))


def _codes_under(
    grid: Values, wanted: Tensor, scheme: Scheme, dither: Tensor | float = 0.0
) -> tuple[Tensor, Tensor]:
    """Quantizes `wanted` [N, K] with the scales and zero points of `grid` (Q3). Returns the codes
    and a bool mask [N, K], which is False where rounding to the nearest code leaves the code
    range."""
    qmin, qmax = code_range(scheme.w.bits, scheme.w.symmetric)
    unit = _expanded(grid.scale, wanted, scheme)
    zero = 0 if grid.zero_point is None else _expanded(grid.zero_point, wanted, scheme)
    least = 0 if grid.minimum is None else _expanded(grid.minimum, wanted, scheme)
    v = (wanted - least) / unit
    q = torch.nan_to_num((v + dither).round() + zero, 0, 0, 0)
    return q.clamp(qmin, qmax).to(torch.int8), (v.round() + zero).clamp(
        qmin, qmax
    ) == v.round() + zero


def _rows_of(keep: Tensor, kept: Tensor, made: Tensor) -> Tensor:
    return torch.where(keep.reshape(-1, *[1] * (kept.dim() - 1)), kept, made)


def _expanded(of_rows: Tensor, like: Tensor, scheme: Scheme) -> Tensor:
    """Repeats a scale or zero point of each row or group to one for each element, [N, K]."""
    n, k = like.shape
    parts = of_rows.reshape(n, of_rows.numel() // max(n, 1))
    return parts.repeat_interleave(scheme.w.group or max(k, 1), 1)[:, :k]


def _requantized(value: Tensor, now: Frozen, scheme: Scheme) -> Frozen:
    """Quantizes the floats `value` [N, K] with new scales; the quantization of inputs stays the
    same. Equations (R1) (Q1)-(Q3)."""
    spec, factor = scheme.w, now.factor
    if spec.axes == PER_COLUMN and now.x_scale is None:
        factor = None  # it follows the weight (R2)
    elif spec.axes == PER_COLUMN:  # the static scale is of inputs times this factor
        spec = replace(spec, axes=PER_TENSOR)
    numbers = None if factor is None else tuple(factor.tolist())
    packed = pack(value, (), Packing(spec, numbers, scheme.rotation, group=scheme.group))
    factor = now.factor if packed.factor is None else packed.factor
    return now._replace(packed=packed.weight, factor=factor)


def _log_change(value: Tensor, stored: Tensor, made: Tensor) -> None:
    change = (value - stored).flatten()
    kept = float((made - stored).flatten() @ change / (change @ change))
    n, k = value.shape
    text = (
        "an int8 weight %dx%d was written, %.1f dB above its rounding; %.1f %% of the change kept"
    )
    log.info(text, k, n, float(sqnr(value, made)), 100 * kept)
