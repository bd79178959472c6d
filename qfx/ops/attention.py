"""int8_attention: softmax(q k^T) v with both matmuls in int8. This module contains the reference
and the fake implementation; `attention_backward` has the gradient.

See docs/numerics.md (A1) to (A6).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qfx.ops.code import Code
from qfx.ops.heads import added, batch_of, matched
from qfx.ops.quantize import SMALLEST_SCALE, quantize, rotate
from qfx.ops.registry import fake, reference

PROBABILITY_MAX = 65535  # the largest integer that represents a probability
SMALLEST_WEIGHT = -60.0  # x = t - top below this counts as -inf: the weight is 0
SMALLEST_TOP = 2.0**-100


@reference
def int8_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """Computes attention in int8: q [*B, M, D], k [*B, N, D], v [*B, N, E] -> out_dtype [*B, M, E].

    Batch axes broadcast. k and v may have fewer heads (the last of *B) than q; each of them then
    belongs to several consecutive heads of q. `mask`: float32, added to the scores, or bool,
    whether a key counts; broadcasts to [*B, M, N]. `causal`: row m sees the keys 0..m. A row that
    sees no key is 0.
    """
    q, k, v = matched(q, k, v)
    m, n, e = q.shape[-2], k.shape[-2], v.shape[-1]
    if m == 0 or n == 0:
        return q.new_zeros((*q.shape[:-1], e), dtype=out_dtype)
    v_codes, v_scale = codes_of_heads(v)  # (A3)
    w = weights(q, k, added(mask, causal, m, n, q.device), scale, causal, v_scale)
    v_scale = torch.where(v_scale.isfinite() & (v_scale > SMALLEST_SCALE), v_scale, 0.0)
    total = w.sum(-1, keepdim=True)
    u = w * v_scale.mT  # (A5)
    most = u.amax(-1, keepdim=True).clamp_min(SMALLEST_TOP)
    p = (u.double() * (PROBABILITY_MAX / most).double()).round().nan_to_num(0)
    high, low = ((part @ v_codes.double()).float() for part in (p // 256, p % 256))
    factor = (most / (PROBABILITY_MAX * total)).masked_fill(total == 0, 0)
    y = rotate((high * 256 + low) * factor, None, rotation_of_heads(e), True)  # (A6)
    return y.to(out_dtype)


def weights(q: Tensor, k: Tensor, b: Tensor, scale: float, causal: bool, v_scale: Tensor) -> Tensor:
    """Returns the weights float32 [*B, M, N] of the keys, which become probabilities when they are
    divided by their sum. `b`: what `added` returns. `v_scale` [*B, N, 1]: the scales of the values;
    where one is not finite, rows that see it are NaN. (A1) to (A4)"""
    b = b.expand(*q.shape[:-1], k.shape[-2])
    seen = b != -math.inf
    keys = k.float() if causal else _centered(k.float(), seen)
    q_codes, q_scale = codes_of_heads(q)
    k_codes, k_scale = codes_of_heads(keys)
    k_scale = torch.where(v_scale.isfinite(), k_scale, math.nan)
    acc = (q_codes.double() @ k_codes.double().mT).float()
    t = (acc * ((q_scale * scale) * k_scale.mT) + b).masked_fill(~seen, -math.inf)
    top = t.amax(-1, keepdim=True)
    x = t - top.masked_fill(top == -math.inf, 0)
    return x.exp().masked_fill(x < SMALLEST_WEIGHT, 0)


def rotation_of_heads(features: int | None) -> int:
    """Returns the size of the blocks in which attention rotates so many features; 0 for none.
    (A3)"""
    return next((block for block in (64, 16) if features and features % block == 0), 0)


def codes_of_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the codes int8 of queries, keys or values [*B, M, D], rotated, and their scales [*B,
    M, 1]. (A3)"""
    codes, scale, _ = quantize(x, Code(rotation=rotation_of_heads(x.shape[-1])))
    return codes, scale


def _centered(k: Tensor, seen: Tensor) -> Tensor:
    """Subtracts from k the mean of the keys that the rows of a head see, summed in order, if all
    rows see the same keys. (A2)"""
    row = seen[..., :1, :].mT
    alike = (seen == row.mT).all((-1, -2), keepdim=True) & row.any(-2, keepdim=True)
    total = k.new_zeros(*k.shape[:-2], 1, k.shape[-1])
    for key, counts in zip(k.split(1, dim=-2), row.split(1, dim=-2), strict=True):
        total = torch.where(counts, total + key, total)
    return torch.where(alike, k - total / row.sum(-2, keepdim=True), k)


@fake("int8_attention")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    return q.new_empty((*batch_of(q, k, v), q.shape[-2], v.shape[-1]), dtype=out_dtype)
