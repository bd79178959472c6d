"""Written: what a `qfx.nn.Linear` holds after its weight was written to, as by a merged adapter.

Values that are written become codes again, such that small changes are not lost. What takes a
change back, as of an adapter that is taken out again, restores the very codes of before. (Q13)
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
KEPT = 4  # writes that can be taken back, the last one first


class PreviousWeight(NamedTuple):
    """What a module held, `projections` [N, P] of the change that was then written to it, and how
    many writes had come before."""

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
    """What a module holds, and held before, when `value` [N, K] is written to the weight `now`.

    `rounding`: of the type that `value` was computed in, relative; 0 of float32. How much of the
    change the codes keep is logged.
    """
    value, held = value.detach().float(), float_weight(now, scheme, *value.shape)
    change = total = _projected(value - held)
    slack = 2.0**-16 * value.shape[1] ** 0.5 * (value.norm(dim=1) + held.norm(dim=1))[:, None]
    if bool((total.abs() <= slack).all()):
        return now, earlier
    for i in reversed(range(len(earlier))):
        total = total + earlier[i].change
        exact = bool((total.abs() <= slack).all())
        if exact or _lost_in_rounding(total, change, rounding, value, held):
            return earlier[i].frozen, earlier[:i]
    count = earlier[-1].before + 1 if earlier else 0
    made = _quantized(value, held, now, scheme, count)
    _tell(value, held, float_weight(made, scheme, *value.shape))
    return made, (*earlier, PreviousWeight(now, change, count))[-KEPT:]


def _lost_in_rounding(
    total: Tensor, change: Tensor, rounding: float, value: Tensor, held: Tensor
) -> bool:
    """Whether what is left of changes may be the roundings of two sums in a narrow type alone, and
    the last change has taken back most of the others. (Q13)"""
    left, sizes = total.square().sum(), value.square().sum() + held.square().sum()
    expected = total.shape[1] * rounding**2 * sizes
    return bool(left <= expected and left <= change.square().sum() / 2)


def _projected(change: Tensor) -> Tensor:
    """Sums of each row under 8 patterns of signs: what tells one change from another. (Q13)"""
    minus = _uniform((change.shape[1], 8), 1, change.device) < 0.5
    return change @ (1 - 2 * minus.float())


def _uniform(shape: Sequence[int], seed: int, device: torch.device) -> Tensor:
    """Numbers float32 in [0, 1) that are the same on every device."""
    random = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=random, dtype=torch.float32, device="cpu").to(device)


def check_written(value: Any, n: int, k: int, held: Tensor) -> None:
    """Raises TypeError or ValueError for what is no weight [n, k] with values where `held` is."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"Linear: the weight that is written is {kind}, expected a float tensor")
    if value.shape != (n, k) or value.device != held.device or not has_values(value):
        raise ValueError(
            f"Linear: the weight that is written is {list(value.shape)} on {value.device}, "
            f"expected values {[n, k]} on {held.device}"
        )


def nearest(value: Tensor, now: Frozen, scheme: Scheme) -> Frozen:
    """What a module holds when `value` [N, K] is loaded into it: the nearest codes, whatever it
    held, for the inputs that it has. (R1) (Q1)-(Q3)"""
    return _anew(value.detach().float(), now, scheme)


def _quantized(value: Tensor, held: Tensor, now: Frozen, scheme: Scheme, count: int) -> Frozen:
    """The codes of `value`. Rows that change by less than half a step keep their scale where they
    can, and are rounded at random: what is on a grid, rounded to the nearest, would not hear of
    the change. Each of several writes has numbers of its own, so that their roundings do not add
    up, as in a moving average. (Q13)"""
    made = _anew(value, now, scheme)
    if made.factor is not now.factor:  # another grid altogether
        return made
    change = transformed_weight(value - held, now.factor, scheme.rotation)
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
    given = Values(after.codes, *mixed)
    dither = _uniform(value.shape, 2 + count, value.device) - 0.5
    dither = torch.where(small[:, None], dither, 0.0)
    codes = _codes_under(given, wanted, scheme, dither)[0]
    return made._replace(packed=packed_values(given._replace(codes=codes), *kind))


def _codes_under(
    given: Values, wanted: Tensor, scheme: Scheme, dither: Tensor | float = 0.0
) -> tuple[Tensor, Tensor]:
    """(Q3) with the scales of `given`, and where they reach."""
    qmin, qmax = code_range(scheme.w.bits, scheme.w.symmetric)
    unit = _expanded(given.scale, wanted, scheme)
    zero = 0 if given.zero_point is None else _expanded(given.zero_point, wanted, scheme)
    least = 0 if given.minimum is None else _expanded(given.minimum, wanted, scheme)
    v = (wanted - least) / unit
    q = torch.nan_to_num((v + dither).round() + zero, 0, 0, 0)
    return q.clamp(qmin, qmax).to(torch.int8), (v.round() + zero).clamp(
        qmin, qmax
    ) == v.round() + zero


def _rows_of(keep: Tensor, kept: Tensor, made: Tensor) -> Tensor:
    return torch.where(keep.reshape(-1, *[1] * (kept.dim() - 1)), kept, made)


def _expanded(of_rows: Tensor, like: Tensor, scheme: Scheme) -> Tensor:
    """A scale or zero point of each row, or of groups of it, for each element [N, K]."""
    n, k = like.shape
    parts = of_rows.reshape(n, of_rows.numel() // max(n, 1))
    return parts.repeat_interleave(scheme.w.group or max(k, 1), 1)[:, :k]


def _anew(value: Tensor, now: Frozen, scheme: Scheme) -> Frozen:
    """The nearest codes under scales of their own, for the inputs that the module has. (R1)
    (Q1)-(Q3)"""
    spec, factor = scheme.w, now.factor
    if spec.axes == PER_COLUMN and now.x_scale is None:
        factor = None  # it follows the weight (R2)
    elif spec.axes == PER_COLUMN:  # the static scale is of inputs times this factor
        spec = replace(spec, axes=PER_TENSOR)
    numbers = None if factor is None else tuple(factor.tolist())
    packed = pack(value, (), Packing(spec, numbers, scheme.rotation, group=scheme.group))
    factor = now.factor if packed.factor is None else packed.factor
    return now._replace(packed=packed.weight, factor=factor)


def _tell(value: Tensor, held: Tensor, made: Tensor) -> None:
    change = (value - held).flatten()
    kept = float((made - held).flatten() @ change / (change @ change))
    n, k = value.shape
    text = (
        "an int8 weight %dx%d was written, %.1f dB above its rounding; %.1f %% of the change kept"
    )
    log.info(text, k, n, float(sqnr(value, made)), 100 * kept)
