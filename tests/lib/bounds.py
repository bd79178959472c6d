"""Running error analysis: for every exact value v, a bound e on the error of the computed one.

A `Known` is such a pair. A rule maps the operands' pairs to the error of a result, or of what an
in-place operation leaves behind: the incoming error, times how much the operation can amplify it,
plus the roundings of the operation itself. `u` is the unit roundoff of the result's type; PyTorch
computes half types in float32 and rounds the result, so `U32` counts inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from qfx.ops import REFERENCES
from qfx.ops.heads import added, matched
from qfx.ops.kv_blocks import found_by
from qfx.ops.kv_cache import features_of, key_codes, rotation_of, value_codes
from qfx.ops.kv_pages import joined, visible
from qfx.values.scheme import PER_TENSOR, QSpec
from tests.lib.strategies import step_error

U32 = 2.0**-24
# The exact values are also computed in float64: both sides round.
UNIT = {torch.float32: U32, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
UNIT[torch.float64] = 2.0**-52
# Absolute rounding in the subnormal numbers, which kernels may flush to zero in float32.
TINY = {u: max(2.0**-126, torch.finfo(t).tiny * torch.finfo(t).eps) for t, u in UNIT.items()}
STEEPEST = 1.13  # the largest slope of gelu, at sqrt(2); silu's is 1.0999


class Known(NamedTuple):
    """The exact value, float64, and a bound on every element's error."""

    v: Tensor
    e: Tensor

    @property
    def most(self) -> Tensor:
        """The largest absolute value that may have been computed."""
        return self.v.abs() + self.e


Rule = Callable[..., Tensor]


def rounded(u: float, v: Tensor, e: Tensor) -> Tensor:
    """Returns the error of a value known to e, after one rounding."""
    return e + u * (v.abs() + e) + TINY[u]


def add(u: float, a: Known, b: Known) -> Tensor:
    return rounded(u, a.v + b.v, a.e + b.e)


def mul(u: float, a: Known, b: Known) -> Tensor:
    """Uses a~ b~ - a b = a (b~ - b) + (a~ - a) b~."""
    return rounded(u, a.v * b.v, a.v.abs() * b.e + a.e * b.most)


def axpy(factor: float) -> Rule:
    """Returns the rule of a + factor * b; the product may round."""

    def rule(u: float, a: Known, b: Known) -> Tensor:
        return rounded(u, a.v + factor * b.v, a.e + abs(factor) * (b.e + u * b.most))

    return rule


def affine(factor: float, term: float) -> Rule:
    """Returns the rule of factor * a + term; the product rounds too."""

    def rule(u: float, a: Known) -> Tensor:
        return rounded(u, factor * a.v + term, abs(factor) * (a.e + u * a.most))

    return rule


def slope(steepest: float) -> Rule:
    """Returns the rule of a function with |f'| <= steepest that is computed exactly."""
    return lambda u, a: steepest * a.e


def smooth(steepest: float, ulps: int) -> Rule:
    """Returns the `slope` rule for |f(v)| <= max(1, |v|) within ulps * 2^-24 of that. (E2)"""

    def rule(u: float, a: Known) -> Tensor:
        most = a.most.clamp_min(1)
        return rounded(u, most, steepest * a.e + ulps * U32 * most)

    return rule


def cast(u: float, a: Known) -> Tensor:
    return rounded(u, a.v, a.e)


def larger(u: float, a: Known, b: Known) -> Tensor:
    """Bounds max and min of two: they move by no more than the operand that moves most."""
    return torch.maximum(a.e, b.e)


def largest(u: float, a: Known) -> Tensor:
    return a.e.amax(-1, keepdim=True)


def mean(u: float, a: Known) -> Tensor:
    terms = a.v.shape[-1] + 2
    inside = a.e.mean(-1, keepdim=True) + terms * U32 * a.most.mean(-1, keepdim=True)
    return rounded(u, a.v.mean(-1, keepdim=True), inside)


def attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Bounds the distance of `attention_decode` from its reference: (A9), and two roundings."""
    q, k, v = matched(q, k, v)
    d, n = k.shape[-1], k.shape[-2]
    if n == 0:
        return torch.zeros(())
    b = added(mask, causal, q.shape[-2], n).double()
    q, k, v = q.double(), k.double(), v.double()
    terms = q.abs() @ k.abs().mT * abs(scale) + b.abs().nan_to_num(posinf=0)
    terms = terms.masked_fill(b == -torch.inf, 0)
    most = terms.amax(-1, keepdim=True)
    power = 2 * (d / 16 + 8) * U32 * most + (4 * most + 2 * n + 16) * U32
    largest = v.abs().amax(-2, keepdim=True)
    inside = largest * (torch.expm1(power) + n * torch.e**-80)
    return inside + 2 * (UNIT[dtype] * (largest + inside) + TINY[UNIT[dtype]])


def kv_attention(
    q: Tensor,
    keys: Tensor,
    key_scale: Tensor,
    values: Tensor,
    value_scale: Tensor,
    mask: Tensor | None,
    scale: float,
    length: int,
    dtype: torch.dtype,
    block_table: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Bounds the distance of `kv_attention` from its reference: (K6), and two roundings."""
    keys, key_scale = (found_by(block_table, t) for t in (keys, key_scale))
    values, value_scale = (found_by(block_table, t) for t in (values, value_scale))
    if 0 in (length, q.numel()):
        return torch.zeros(())
    group, (d, e) = q.shape[1] // keys.shape[1], (q.shape[-1], features_of(values, value_scale))
    k = _sizes(key_codes(keys, key_scale, length), key_scale).repeat_interleave(group, 1)
    codes = value_codes(values, value_scale, length)
    v = _sizes(codes, value_scale).repeat_interleave(group, 1)
    steps = value_scale[:, :, :length, :1].double().amax(2) * codes.double().abs().amax(2)
    b = added(mask, False, q.shape[2], length).double()
    hidden = (b == -torch.inf).expand(*q.shape[:3], length)
    across_q, across_v = (rotation(rotation_of(n), n).abs() for n in (d, e))
    turned, k = q.double().abs() @ across_q.mT, k.nan_to_num(posinf=0)
    terms = turned @ k.mT * abs(scale)
    terms = (terms + b.abs().nan_to_num(posinf=0)).masked_fill(hidden, 0)
    most = terms.amax(-1, keepdim=True)
    of_codes = turned.amax(-1, keepdim=True) * k.sum(-1)[:, :, None] * abs(scale) / 64000
    power = 2 * of_codes.masked_fill(hidden, 0).amax(-1, keepdim=True)
    power = power + 2 * (d / 4 + 32) * U32 * most + (8 * most + 2 * length + 128) * U32
    power = power + 16 * softcap * U32
    largest = torch.where(hidden[..., None], 0, v[:, :, None]).amax(-2) @ across_v
    inside = largest * (torch.expm1(power) + length * torch.e**-60)
    steps = steps.repeat_interleave(group, 1)[:, :, None] @ across_v
    inside = inside + length / 128000 * steps.nan_to_num(nan=0, posinf=0)
    return inside + 2 * (UNIT[dtype] * (largest + inside) + TINY[UNIT[dtype]])


def kv_attention_pages(
    q: Tensor,
    keys: Tensor,
    key_scale: Tensor,
    values: Tensor,
    value_scale: Tensor,
    pages: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
    dtype: torch.dtype,
    softcap: float = 0.0,
) -> Tensor:
    """Bounds it as `kv_attention` of each text; 0 for a query of no text."""
    found = q.new_zeros((*q.shape[:2], features_of(values, value_scale)), dtype=torch.float64)
    for s, length in enumerate(lengths.tolist()):
        rows = slice(int(starts[s]), int(starts[s + 1]))
        cache = (joined(t, pages[s], length) for t in (keys, key_scale, values, value_scale))
        mask = visible(rows.stop - rows.start, length, window)
        of_text = q[rows].transpose(0, 1)[None]
        given = (mask, scale, length, dtype, None, softcap)
        limit = kv_attention(of_text, *cache, *given)
        found[rows] = limit[0].transpose(0, 1) if limit.ndim else limit
    return found


def _sizes(codes: Tensor, scale: Tensor) -> Tensor:
    """Returns the magnitudes of the terms of which rotated keys or values are sums. (K2)"""
    scale = scale[:, :, : codes.shape[2]].double().abs()
    return codes.double().abs() * scale[..., :1] + (scale[..., 1:] if scale.shape[-1] == 2 else 0)


def softmax(u: float, a: Known, kept: Tensor | None = None) -> Tensor:
    """Bounds p~ = exp(x~) / sum exp(x~): the quotient moves by a factor of at most exp(e_i + max
    e). Elements not `kept` are 0."""
    k = a.v.shape[-1]
    lost = torch.zeros_like(a.v, dtype=torch.bool) if kept is None else ~kept.expand_as(a.v)
    span = a.most.masked_fill(lost, 0).amax(-1, keepdim=True)
    inside = (a.e + 2 * U32 * (a.most + span)).masked_fill(lost, 0)  # x - max(x) rounds
    power = inside + inside.amax(-1, keepdim=True) + (k + 8) * U32  # exp, sum, division
    p = a.v.masked_fill(lost, -torch.inf).softmax(-1).nan_to_num(0)  # 0 if none is kept
    moved = torch.where(power > 20, 1.0, p * torch.expm1(power.clamp_max(20))).clamp_max(1)
    return rounded(u, p, moved.masked_fill(lost, 0))


def norm(centered: bool, eps: float) -> Rule:
    """Returns the rule of c / sqrt(mean c^2 + eps) * w + b, c = x - mean x or x.

    With d a bound on c's error, the root moves by at most s = sqrt(mean d^2), being a norm of the
    vector (c, sqrt(K eps)); so c / root moves by at most d / low + |c| s / (root low), low the
    smallest root possible. No normalized element exceeds sqrt(K).
    """

    def rule(u: float, x: Known, w: Known, b: Known | None = None) -> Tensor:
        k = x.v.shape[-1]
        d = x.e + 2 * (k + 8) * U32 * x.most.amax(-1, keepdim=True)
        c = x.v
        if centered:
            c, d = c - c.mean(-1, keepdim=True), d + d.mean(-1, keepdim=True)
        root = (c.square().mean(-1, keepdim=True) + eps).sqrt()
        s = d.square().mean(-1, keepdim=True).sqrt()
        low = (root - s).clamp_min(eps**0.5)
        y = c / root
        moved = torch.minimum(d / low + y.abs() * s / low, y.abs() + k**0.5)
        moved = moved + 8 * U32 * (y.abs() + moved)
        scaled = Known(y * w.v, mul(U32, Known(y, moved), w))
        if b is None:
            return rounded(u, *scaled)
        return rounded(u, scaled.v + b.v, add(U32, scaled, b))

    return rule


# --- products ---

Product = Callable[[Tensor, Tensor, Tensor], Tensor]  # (x, w, bias) -> bilinear in x, w, plus bias


def quantization_error(spec: QSpec, t: Known, axes: tuple[int, ...]) -> Tensor:
    """Bounds the error (B1) of the codes of any tensor within t, whose rows run along `axes`."""
    axes = tuple(range(t.v.ndim)) if spec.axes == PER_TENSOR else axes
    if spec.symmetric:
        scale = t.most.amax(axes, keepdim=True) / (2 ** (spec.bits - 1) - 1)
    else:
        high = (t.v + t.e).amax(axes, keepdim=True).clamp_min(0)
        low = (t.v - t.e).amin(axes, keepdim=True).clamp_max(0)
        scale = (high - low) / (2**spec.bits - 1)
    error = step_error(scale.clamp_min(2.0**-126), spec.bits, spec.symmetric)
    return error.expand(t.v.shape)


def rotation(block: int, k: int) -> Tensor:
    """Returns R.T of (R1) in blocks of at most `block`, in float64, [K, K]."""
    return REFERENCES["rotate"](torch.eye(k), None, block).double()


def turned(block: int, t: Known, axes: tuple[int, ...]) -> Known:
    """Returns R t, with K along `axes`. (R1) (B4)"""
    if not block:
        return t
    last = tuple(range(-len(axes), 0))
    v, e = (part.movedim(axes, last) for part in t)
    flat, shape = v.flatten(last[0]), v.shape
    r = rotation(block, flat.shape[-1])
    error = (e.flatten(last[0]) + 8 * U32 * (flat.abs() + e.flatten(last[0]))) @ r.abs()
    return Known(*(part.reshape(shape).movedim(last, axes) for part in (flat @ r, error)))


def widened(spec: QSpec, t: Known, axes: tuple[int, ...]) -> Known:
    """Returns t with the error of its codes added."""
    return Known(t.v, t.e + quantization_error(spec, t, axes))


def product(u: float, f: Product, x: Known, w: Known, bias: Known, k: int) -> Tensor:
    """Bounds (B2) for any spelling f of a product: its bilinear part, with e_x and e_w errors of
    operands, and K + 8 roundings of the sum of absolute values; bias and result round in `u`."""
    none = torch.zeros_like(bias.v)
    moved = f(x.v.abs(), w.e, none) + f(x.e, w.most, none) + f(x.v * 0, w.v * 0, bias.e)
    largest = f(x.most, w.most, bias.most)
    return moved + ((k + 8) * U32 + 3 * u) * largest + TINY[u]


EIGHT_BITS = QSpec()
HALF_A_PROBABILITY = 0.51 / 65535


class Attention(NamedTuple):
    """The rule of softmax(q k^T / sqrt(D)) v over visible keys, for int8 in floats or in codes.

    The mask is bool, or added: then its values must not be so large that scores are lost in the
    sum. `groups`: heads of q that share the first of these heads of k and v. Keys that a row does
    not see do not affect its bound.
    """

    causal: bool = False
    groups: int = 1

    def __call__(self, u: float, q: Known, k: Known, v: Known, mask: Known | None = None) -> Tensor:
        k, v = self._of_all_heads(k), self._of_all_heads(v)
        return _mixed(u, _probabilities(u, q, k, self._added(q, k, mask)), v)

    def in_codes(self, u: float, q: Known, k: Known, v: Known, mask: Known | None = None) -> Tensor:
        """Bounds (A1) to (A6), or the computation in floats if that is larger."""
        in_floats = self(u, q, k, v, mask)
        k, v = self._of_all_heads(k), self._of_all_heads(v)
        b = self._added(q, k, mask)
        keys = k if self.causal else _centered(k, b != -torch.inf)
        p = _probabilities(u, _rotated_codes(q), _rotated_codes(keys), b)
        p = Known(p.v, p.e + 2.0**-18 * p.most)  # (A4)
        values = _codes_rotated_back(v)
        return torch.maximum(in_floats, _mixed(u, p, values) + _rounded_probabilities(p, v))

    def _of_all_heads(self, t: Known) -> Known:
        if self.groups == 1:
            return t
        first = (part[..., :: self.groups, :, :] for part in t)
        return Known(*(part.repeat_interleave(self.groups, -3) for part in first))

    def _added(self, q: Known, k: Known, mask: Known | None) -> Tensor:
        """Returns the mask [..., M, N], minus infinity for keys that a row does not see. (A1)"""
        b = None if mask is None else mask.v
        b = b.float() if b is not None and b.dtype != torch.bool else b
        return added(b, self.causal, q.v.shape[-2], k.v.shape[-2]).double()


def _probabilities(u: float, q: Known, k: Known, b: Tensor) -> Known:
    """Returns the probabilities, which half types may round. Minus infinity in b hides a key."""
    scale, none = q.v.shape[-1] ** -0.5, Known(*torch.zeros(2, 1).double())
    kt = Known(k.v.mT, k.e.mT)
    scores = product(u, lambda a, b, c: a @ b * scale + c, q, kt, none, q.v.shape[-1])
    kept, finite = b != -torch.inf, b.masked_fill(b == -torch.inf, 0)
    s = Known(q.v @ kt.v * scale, scores)
    s = Known(s.v + finite, rounded(u, s.v + finite, s.e))
    return Known(s.v.masked_fill(~kept, -torch.inf).softmax(-1).nan_to_num(0), softmax(u, s, kept))


def _mixed(u: float, p: Known, v: Known) -> Tensor:
    none = Known(*torch.zeros(2, 1).double())
    return product(u, lambda a, b, c: a @ b + c, p, v, none, v.v.shape[-2])


def _block(k: int) -> int:
    return next((size for size in (64, 16) if k % size == 0), 0)


def _rotated_codes(t: Known) -> Known:
    """Applies (A3): rotated queries and keys have unchanged products."""
    return widened(EIGHT_BITS, turned(_block(t.v.shape[-1]), t, (-1,)), (-1,))


def _codes_rotated_back(v: Known) -> Known:
    """Bounds (A6): codes of a value are off by steps; rotated back, by sums of steps."""
    block = _block(v.v.shape[-1])
    there = turned(block, v, (-1,))
    steps = quantization_error(EIGHT_BITS, there, (-1,)) + 8 * U32 * block**0.5 * there.most
    return Known(v.v, v.e + steps @ rotation(block, v.v.shape[-1]).abs().mT)


def _rounded_probabilities(p: Known, v: Known) -> Tensor:
    """Bounds (A5): each integer is off by half a step of the row's greatest weight times a value's
    scale, and multiplies a code of at most 127; rotated back, these errors add up."""
    block, n = _block(v.v.shape[-1]), v.v.shape[-2]
    largest = turned(block, v, (-1,)).most.amax(-1)[..., None, :]
    greatest = (p.most * largest).amax(-1, keepdim=True)
    return max(block, 1) ** 0.5 * n * (HALF_A_PROBABILITY * greatest + 2.0**-90)


def _centered(k: Known, kept: Tensor) -> Known:
    """Applies (A2): subtracts the mean of keys that all rows see; softmax does not change."""
    row = kept[..., :1, :].mT.expand(*k.v.shape[:-1], 1)
    alike = (kept == kept[..., :1, :]).all((-1, -2), keepdim=True) & row.any(-2, keepdim=True)
    seen, count = (
        Known(*(t.masked_fill(~row, 0) for t in k)),
        row.sum(-2, keepdim=True).clamp_min(1),
    )
    mean, off, size = (t.sum(-2, keepdim=True) / count for t in (*seen, seen.most))
    error = k.e + off + U32 * ((k.v.shape[-2] + 2) * size + k.most)
    return Known(torch.where(alike, k.v - mean, k.v), torch.where(alike, error, k.e))
