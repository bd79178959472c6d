"""The int8 gradients of an attention, compared with those in float."""

from __future__ import annotations

import torch
from torch import Tensor

from qfx.host.autograd import saving_values
from qfx.nn.attention import IN_FLOAT

CLOSE = 0.995  # cosine to those in float, below which an attention should stay float


def gradient_cosine(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool, gqa: bool
) -> float:
    """Returns the least of the cosines of the int8 gradients of q, k and v with those in float32,
    for a gradient of the output that is drawn from a normal distribution, the same at each call."""
    apart = torch.autocast(q.device.type, enabled=False)
    with torch.inference_mode(False), torch.enable_grad(), apart, saving_values():
        leaves = [t.detach().float().clone().requires_grad_() for t in (q, k, v)]
        mask = None if mask is None else mask.clone()
        exact = IN_FLOAT(*leaves, mask, is_causal=causal, scale=scale, enable_gqa=gqa)
        in_int8 = torch.ops.qfx.int8_attention(*leaves, mask, scale, causal, torch.float32)
    draw = torch.Generator().manual_seed(0)
    grad = torch.randn(exact.shape, generator=draw, dtype=torch.float32, device="cpu")
    pairs = zip(
        *(torch.autograd.grad(y, leaves, grad.to(y.device)) for y in (exact, in_int8)), strict=True
    )
    return min(_cosine(a, b) for a, b in pairs)


def _cosine(a: Tensor, b: Tensor) -> float:
    """Returns 1 for two zeros."""
    if not a.any() and not b.any():
        return 1.0
    return torch.cosine_similarity(a.double().ravel(), b.double().ravel(), 0).item()
