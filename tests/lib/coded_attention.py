"""Attention of modules to keys and values that an int8 cache gave them, by the operator that
programs use.

Programs read the codes of a cache, in integers (K3) to (K5). Modules get floats, and their own
attention to them is exact but for float rounding, while (K6) allows an error of 16-bit codes, which
is large enough to tip codes of activations. Inside `reading_codes` both use `kv_attention`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from qfx.ops.kv_cache import kv_empty

_float = torch.nn.functional.scaled_dot_product_attention
ops = torch.ops.qfx


def _coded(k: Tensor, v: Tensor) -> tuple[Tensor, ...] | None:
    """Returns the cache that keys and values were read from: writing them gives its codes again,
    and scales to within float rounding. Returns None if they are from no cache."""
    batch, heads, length, d = k.shape
    for bits in product((8, 4), repeat=2):
        cache = kv_empty(batch, heads, length, d, *bits)
        ops.kv_write(*cache, k, v, torch.arange(length))
        again = (op(*part, length, k.dtype) for op, part in (
            (ops.kv_keys, cache[:2]), (ops.kv_values, cache[2:])
        ))  # fmt: skip
        if all(torch.allclose(a, b, 1e-5, 1e-6) for a, b in zip(again, (k, v), strict=True)):
            return cache
    return None


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    how: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    cache = _coded(k, v) if k.dtype == torch.float32 and k.shape == v.shape else None
    if cache is None:
        return _float(q, k, v, attn_mask, dropout_p, is_causal, **how)
    length, mask = k.shape[2], attn_mask
    if is_causal:
        mask = torch.ones(q.shape[2], length, dtype=torch.bool).tril()[None, None]
    rest = (mask, q.shape[-1] ** -0.5 if scale is None else scale, length, torch.float32)
    y: Tensor = ops.kv_attention(q, *cache, *rest)
    return y


@contextmanager
def reading_codes() -> Iterator[None]:
    with patch.object(torch.nn.functional, "scaled_dot_product_attention", _attend):
        yield
