"""int8_attention: softmax(q k^T) v with both products in int8. Reference, fake, gradient.

docs/numerics.md (A1) to (A6).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qfx.ops.quantize import quantize
from qfx.ops.registry import fake, no_gradient, reference
from qfx.scheme import PER_ROW

PROBABILITY_MAX = 65535  # of the integers that stand for probabilities


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
    """q [*B, M, D], k [*B, N, D], v [*B, N, E] -> out_dtype [*B, M, E].

    `mask`: float32, added to the scores, or bool, whether a key counts; broadcasts to [*B, M, N].
    `causal`: row m sees the keys 0..m. A row that sees no key is 0.
    """
    n = k.shape[-2]
    rotation = next((block for block in (64, 16) if q.shape[-1] % block == 0), 0)  # (A2)
    k_codes, k_scale, _ = quantize(_centered(k.float()), PER_ROW, 8, True, None, rotation)
    q_codes, q_scale, _ = quantize(q, PER_ROW, 8, True, None, rotation)
    acc = (q_codes.double() @ k_codes.double().mT).float()
    scores = acc * ((q_scale * scale) * k_scale.mT)  # (A3)
    if mask is not None:
        kept = torch.zeros_like(mask, dtype=torch.float32)
        added = mask if mask.dtype != torch.bool else kept.masked_fill(~mask, -math.inf)
        scores = scores + added
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if n == 0:
        return q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=out_dtype)
    top = scores.amax(-1, keepdim=True)
    p = ((scores - top).exp() * PROBABILITY_MAX).round()  # (A4)
    p = p.nan_to_num(0)
    v_codes, v_scale, _ = quantize(v.mT, PER_ROW, 8, True)  # (A5)
    high = (p // 256).double() @ v_codes.double().mT
    low = (p % 256).double() @ v_codes.double().mT
    inverse = 1 / p.double().sum(-1, keepdim=True).float()
    inverse = torch.where(top == -math.inf, 0.0, torch.where(top.isfinite(), inverse, math.nan))
    return ((high.float() * 256 + low.float()) * (inverse * v_scale.mT)).to(out_dtype)  # (A6)


def _centered(k: Tensor) -> Tensor:
    """k less its mean over the keys, summed in their order. (A1)"""
    total = torch.zeros(*k.shape[:-2], 1, k.shape[-1])
    for row in k.split(1, dim=-2):
        total = total + row
    return k - total / k.shape[-2] if k.shape[-2] else k


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
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=out_dtype)


no_gradient("int8_attention")
